"""Everything that reads files, each with good files that a seeded hand then breaks (`breaks.py`).

`python tests/readers.py NAMES N SEED` breaks the files of these of `READERS` N times each, reads
them, and prints how often came what. Out may come the reader's own errors, which name the file;
what is read all the same is used.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import breaks
import weft
from core.tokens.builders import byte_level, sentencepiece
from llama_reference import write_folder
from searches import SMALL, small
from weft import Branch, Loom, samples, search
from weft.cli import options
from weft.errors import (
    ConfigError,
    ConstraintError,
    ContextOverflow,
    EngineError,
    FormatError,
    GrammarError,
    KVFull,
    ModelLoadError,
    StoreError,
)
from weft.service.store import Library

Errors = tuple[type[Exception], ...]


class Reader:
    """Good files in a folder, and how they are read and used.

    may: what reading and using may raise, may_read: reading only. named: those of them that name a
    file when they are raised by reading. names: the files that are broken, in turn. name: the one
    that is broken now.
    """

    may: Errors = (StoreError,)
    may_read: Errors = ()
    named: Errors = (FormatError, ModelLoadError)

    def __init__(self, folder: Path, lm: weft.LM) -> None:
        self.folder = folder
        self.lm = lm
        self.names: list[str] = []
        self.name = ""
        self.make()
        self.good = {name: (folder / name).read_bytes() for name in self.names}

    def make(self) -> None:
        """Write the files; say their names."""
        raise NotImplementedError

    def read(self) -> Any:
        """Read the files."""
        raise NotImplementedError

    def use(self, loaded: Any) -> None:
        """Do something with what was read all the same."""

    def change(self, data: bytes, rng: Random) -> bytes:
        """Return the bytes of the file `name`, changed."""
        return breaks.changed(data, rng)

    def trial(self, rng: Random) -> str:
        """Break one file, read it, and say what came of it. Raises: what must not come."""
        for name, data in self.good.items():
            breaks.put(self.folder / name, data)
        self.name = rng.choice(self.names)
        file = self.folder / self.name
        if rng.random() < 0.06:
            kind = rng.choice(list(breaks.KINDS))
            breaks.clear(file)
            breaks.KINDS[kind](file)
        else:
            breaks.put(file, self.change(self.good[self.name], rng))
        try:
            loaded = self.read()
        except (*self.may, *self.may_read) as error:
            message = str(error)
            if isinstance(error, self.named):
                assert self.name in message or self.folder.name in message, (
                    f"no file is named: {message}"
                )
            return type(error).__name__
        try:
            self.use(loaded)
        except self.may as error:
            return f"used: {type(error).__name__}"
        return "read"


class LoomFile(Reader):
    """`Loom.open`, without a model and with one."""

    def make(self) -> None:
        self.names = ["x.loom.json"]
        loom = Loom(self.lm, samples.game24)
        loom.grow(2, max_tokens=3, seed=1, stop="\n", logit_bias={5: -1.0})
        loom.children[0].grow(1, max_tokens=2, constraint={"type": "integer"})
        loom.children[1].add("text").meta["note"] = {"a": [1, "b", None]}
        loom.save(self.folder / "x.loom.json")

    def read(self) -> Loom:
        loom = Loom.open(self.folder / self.name)
        for node in loom.walk():
            repr(node)
        loom.save(self.folder / "again")
        reopened = Loom.open(self.folder / "again")
        assert reopened.count_children() == loom.count_children()
        return Loom.open(self.folder / self.name, self.lm, force=True)

    def use(self, loaded: Loom) -> None:
        leaf = loaded.leaves[-1]
        if leaf.get_prefix_tokens() and not leaf.terminal:
            leaf.next(2)


class BranchFile(Reader):
    """`Branch.load`. What was null may become the name of an adapter."""

    may = (StoreError, ContextOverflow)
    may_read = (ConfigError,)
    named = (FormatError, ConfigError)

    def make(self) -> None:
        self.names = ["branch.json"]
        branch = Branch.create(self.lm, seed=2, repetition_penalty=1.2, grammar={"type": "integer"})
        branch.prefill(self.lm.tokenize(samples.opening))
        branch.commit(self.lm.tokenize("4", add_bos=False)[0])
        branch.save(self.folder / "branch.json")

    def read(self) -> Branch:
        return Branch.load(self.lm, self.folder / self.name)

    def use(self, loaded: Branch) -> None:
        if loaded.position:
            loaded.produce()
            loaded.fork().save(self.folder / "again")


class KVFile(Reader):
    """`lm.kv.load`."""

    may = (StoreError, ContextOverflow, KVFull)

    def make(self) -> None:
        self.names = ["kv.safetensors"]
        self.lm.kv.save([1, 2, 3, 4, 5], self.folder / "kv.safetensors")

    def change(self, data: bytes, rng: Random) -> bytes:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        match rng.randrange(3):
            case 0:
                return breaks.changed_tensors(data, rng)
            case 1:
                loaded = breaks.changed_part(header, header, "__metadata__", rng)
            case _:  # JSON in a text in JSON
                metadata = header["__metadata__"]
                key = rng.choice(["token_ids", "marks", "namespace"])
                changed = breaks.changed_json(metadata[key].encode(), rng)
                metadata[key] = changed.decode(errors="replace")
                loaded = json.dumps(header).encode()
        return breaks.with_header(data, loaded)

    def read(self) -> Any:
        self.lm.clear_cache()
        return self.lm.kv.load(self.folder / self.name)

    def use(self, loaded: Any) -> None:
        if loaded.depth:
            Loom(self.lm, loaded.ids()).next(2)


class ResumeFile(Reader):
    """A search's `resume=`, for each of the searches."""

    may = (StoreError, ConfigError)

    class Stop(Exception):
        """Ends a search in its middle."""

    def make(self) -> None:
        for strategy in SMALL:
            self.name = f"{strategy}.weft"
            self.read()
            self.names.append(self.name)

    def read(self) -> None:
        file = self.folder / self.name
        with suppress(self.Stop):
            small(file.stem, self.lm, samples.game24, resume=file, progress=self.stop)

    def stop(self, level: search.Level) -> None:
        if level.depth >= 2:
            raise self.Stop

    def change(self, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return super().change(data, rng)
        root = json.loads(data)  # the metadata of the search is a small part of it
        return breaks.changed_part(root, root["nodes"][0]["meta"], "search", rng)


class SchemaFile(Reader):
    """`--json-schema`."""

    may = (ConfigError, GrammarError, ConstraintError)
    named = (ConfigError, GrammarError)

    def make(self) -> None:
        self.names = ["schema.json"]
        schema = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 5, "pattern": "^[a-z]+$"},
                "ages": {"type": "array", "items": {"$ref": "#/$defs/age"}, "minItems": 1},
                "kind": {"enum": ["a", "b", 1]},
            },
            "required": ["name"],
            "additionalProperties": False,
            "$defs": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        }
        (self.folder / "schema.json").write_text(json.dumps(schema))

    def read(self) -> dict[str, Any]:
        return options.constraint(self.folder / self.name)

    def use(self, loaded: dict[str, Any]) -> None:
        Loom(self.lm, samples.greeting).grow(1, max_tokens=2, seed=1, **loaded)


class DatabaseFile(Reader):
    """The loom database itself, broken on the disk."""

    may = (StoreError, ConfigError)

    def make(self) -> None:
        self.names = ["weft.db"]
        with closing(Library(self.url)) as library:
            for prompt in ([1, 2, 3], [4, 5]):
                loom = Loom(self.lm, prompt)
                kept = library.create(loom)
                loom.grow(2, max_tokens=3, seed=1)
                kept.commit("grow")

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder / 'weft.db'}"

    def read(self) -> Library:
        for extra in self.folder.glob("weft.db-*"):
            extra.unlink()
        return Library(self.url)

    def use(self, loaded: Library) -> None:
        with closing(loaded) as library:
            for row in library.looms():
                kept = library.open(row.id, self.lm, force=True)
                kept.loom.add([7])
                kept.commit("add")
                kept.undo()
            library.find("the")


class ModelFolder(Reader):
    """`weft.load` of a folder, with the NumPy engine."""

    engine = "numpy"
    may = (EngineError, ConfigError)

    def make(self) -> None:
        write_folder(self.folder, {"vocab_size": 400})
        byte_level(bos=True).save(str(self.folder / "tokenizer.json"))
        template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}!{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
        )
        configs = {
            "tokenizer_config.json": {
                "bos_token": "<|begin|>",
                "eos_token": {"content": "<|end|>", "special": True},
                "chat_template": template,
                "model_max_length": 512,
            },
            "special_tokens_map.json": {"bos_token": "<|begin|>", "eos_token": "<|end|>"},
            "generation_config.json": {
                "do_sample": True,
                "temperature": 0.7,
                "top_k": 20,
                "eos_token_id": [1, 2],
            },
        }
        for name, value in configs.items():
            (self.folder / name).write_text(json.dumps(value, indent=1))
        (self.folder / "chat_template.jinja").write_text(template)
        self.names = ["config.json", "config.json", "tokenizer.json", "tokenizer.json"]
        self.names += ["model.safetensors", "chat_template.jinja", *configs]

    def change(self, data: bytes, rng: Random) -> bytes:
        if self.name.endswith(".safetensors"):
            return breaks.changed_tensors(data, rng)
        if self.name.endswith(".jinja") and rng.random() < 0.5:
            return rng.choice(breaks.TEMPLATES).encode()
        if self.name == "tokenizer_config.json" and rng.random() < 0.2:
            return json.dumps({"chat_template": rng.choice(breaks.TEMPLATES)}).encode()
        return super().change(data, rng)

    def read(self) -> weft.LM:
        return weft.load(self.folder, engine=self.engine)

    def use(self, loaded: weft.LM) -> None:
        with loaded as lm:
            ids = lm.tokenize("hello world")
            lm.detokenize(ids)
            if ids:
                Loom(lm, ids).grow(2, max_tokens=2, seed=1)
            lm.format_chat([{"role": "user", "content": "Hi"}])


class TorchFolder(ModelFolder):
    """The same with the torch engine."""

    engine = "torch"


class ShardedFolder(ModelFolder):
    """A tokenizer of another family, the weights in a shard with an index."""

    def make(self) -> None:
        super().make()
        sentencepiece().save(str(self.folder / "tokenizer.json"))
        shard = self.folder / "model-1.safetensors"
        (self.folder / "model.safetensors").rename(shard)
        data = shard.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        index = {"weight_map": dict.fromkeys(header.keys() - {"__metadata__"}, shard.name)}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.names = ["tokenizer.json", shard.name, "model.safetensors.index.json"]


class AdapterFolder(Reader):
    """`lm.add_adapter`, with the torch engine."""

    may = (EngineError, ConfigError)

    def make(self) -> None:
        self.names = ["adapter_config.json", "adapter_model.safetensors"]
        model = self.folder / "model"
        model.mkdir()
        ModelFolder(model, self.lm)
        self.torch_lm = weft.load(model, engine="torch")
        config = {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "bias": "none",
            "target_modules": ["q_proj"],
            "alpha_pattern": {"q_proj": 8},
            "init_lora_weights": True,
        }
        (self.folder / "adapter_config.json").write_text(json.dumps(config))
        at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
        tensors = {
            f"{at}A.weight": np.zeros((2, 24), np.float32),
            f"{at}B.weight": np.zeros((32, 2), np.float32),
        }
        save_file(tensors, str(self.folder / "adapter_model.safetensors"))

    def change(self, data: bytes, rng: Random) -> bytes:
        if self.name.endswith(".safetensors"):
            return breaks.changed_tensors(data, rng)
        return super().change(data, rng)

    def read(self) -> None:
        self.torch_lm.add_adapter("a", self.folder)


READERS: dict[str, type[Reader]] = {
    "loom": LoomFile,
    "branch": BranchFile,
    "kv": KVFile,
    "resume": ResumeFile,
    "schema": SchemaFile,
    "database": DatabaseFile,
    "model": ModelFolder,
    "sharded": ShardedFolder,
    "torch": TorchFolder,
    "adapter": AdapterFolder,
}


def run(name: str, folder: Path, lm: weft.LM, n: int, seed: int) -> tuple[Counter[str], int]:
    """Break a reader's files n times; print what must not come, and return how often that was."""
    folder.mkdir()
    reader = READERS[name](folder, lm)
    came, n_wrong = Counter[str](), 0
    for trial in range(n):
        try:
            came[reader.trial(Random(f"{name}/{seed}/{trial}"))] += 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # panics of a library among them
            n_wrong += 1
            print(f"{name} seed {seed} trial {trial}\n{traceback.format_exc()}", flush=True)
    return came, n_wrong


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # of the machine, not of a trial
    names, n, seed = sys.argv[1:]
    n_wrong = 0
    with weft.load("tiny") as lm, tempfile.TemporaryDirectory() as folder:
        for name in names.split(","):
            came, wrong = run(name, Path(folder) / f"broken-{name}", lm, int(n), int(seed))
            print(name, dict(came.most_common()), f"{wrong} wrong", flush=True)
            n_wrong += wrong
    sys.exit(n_wrong > 0)


if __name__ == "__main__":
    main()
