"""Broken files for every reader: good files, changed by a seeded hand in all the ways files break.

`python tests/fuzz.py READERS N SEED` changes each reader's files N times and reads them. Out may
come the reader's own errors, with the file's name in them; what is read all the same is used.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import weft
from llama_reference import write_folder
from searches import SMALL, small
from tokens.builders import byte_level, sentencepiece
from weft import Branch, Loom, errors, samples, search
from weft.cli import options
from weft.cli.shelf import Shelf
from weft.errors import WeftError

Random = random.Random
# What JSON has no word for, or no reader can take; written into the text as they are.
RAW = ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1" * 5000, "-0", "1e-999", "0.1e1"]
RAW += ["[" * n + "1" + "]" * n for n in (20, 200, 800, 5000)]
RAW += ['{"a":' * n + "null" + "}" * n for n in (200, 800, 5000)]
PLACE = "@raw@"
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63),
    10**18, 10**30, 0.5, -1.5, 1e308, 1e-320, "", "x", "1", "nan", "inf", "-inf", "\u0000",
    "\ud800", "ü" * 300, "../../x", "/", [], {}, [[]], [None], [1], ["x"], {"x": 1}, {"": []}, [{}],
    [1, 2, 3], {"type": "x"}, {"content": 5}, "[", "(?P<", "{{", "{% for", [[1, 2], [3]],
]  # fmt: skip


class Reader:
    """Good files in a folder, and how they are read and used.

    may: what reading and using may raise. names: the files that are changed.
    """

    may: tuple[type[BaseException], ...] = (WeftError,)

    def __init__(self, folder: Path, lm: weft.LM) -> None:
        self.folder = folder
        self.lm = lm
        self.names: list[str] = []
        self.make()
        self.good = {name: (folder / name).read_bytes() for name in self.names}

    def make(self) -> None:
        raise NotImplementedError

    def read(self) -> object:
        raise NotImplementedError

    def use(self, made: Any) -> None:
        """Do something with what was read all the same."""

    def change(self, data: bytes, name: str, rng: Random) -> bytes:
        """Return a file's bytes, changed."""
        if rng.random() < 0.65:
            try:
                return changed_json(data, rng)
            except ValueError:
                pass
        return changed_bytes(data, rng)

    def restore(self) -> None:
        """Put the good files back."""
        for name, data in self.good.items():
            put(self.folder / name, data)

    def trial(self, rng: Random) -> str:
        """Change one file, read it, and say what came of it. Raises what must not come."""
        name = rng.choice(self.names)
        if rng.random() < 0.06:
            what = rng.choice(list(KINDS))
            clear(self.folder / name)
            KINDS[what](self.folder / name)
        else:
            put(self.folder / name, self.change(self.good[name], name, rng))
        try:
            made = self.read()
        except self.may as error:
            if self.must_name(error):
                told = str(error)
                assert name in told or str(self.folder) in told, f"no file is named: {told}"
            return type(error).__name__
        try:
            self.use(made)
        except self.may as error:
            return f"used: {type(error).__name__}"
        return "read"

    def must_name(self, error: BaseException) -> bool:
        """Whether the file's name belongs into the error."""
        return isinstance(error, errors.FormatError | errors.ModelLoadError)


class LoomFile(Reader):
    """`Loom.open`, without a model and with one."""

    may = (errors.StoreError,)

    def make(self) -> None:
        self.names = ["x.loom.json"]
        loom = Loom(self.lm, samples.game24)
        loom.grow(2, max_tokens=3, seed=1, stop="\n", logit_bias={5: -1.0})
        loom.children[0].grow(1, max_tokens=2, constraint={"type": "integer"})
        loom.children[1].add("text").meta["note"] = {"a": [1, "b", None]}
        loom.save(self.folder / self.names[0])

    def read(self) -> object:
        loom = Loom.open(self.folder / "x.loom.json")
        for node in loom.walk():
            repr(node)
        loom.save(self.folder / "again")
        again = Loom.open(self.folder / "again")
        assert again.count_children() == loom.count_children()
        return Loom.open(self.folder / "x.loom.json", self.lm, force=True)

    def use(self, made: Loom) -> None:
        leaf = made.leaves[-1]
        if leaf.get_prefix_tokens() and not leaf.terminal:
            leaf.next(2)


class BranchFile(Reader):
    """`Branch.load`, of a file."""

    may = (errors.StoreError, errors.ContextOverflow)

    def make(self) -> None:
        self.names = ["branch.json"]
        branch = Branch.create(self.lm, seed=2, repetition_penalty=1.2, grammar={"type": "integer"})
        branch.prefill(self.lm.tokenize(samples.opening))
        branch.commit(self.lm.tokenize("4", add_bos=False)[0])
        branch.save(self.folder / "branch.json")

    def read(self) -> object:
        return Branch.load(self.lm, self.folder / "branch.json")

    def use(self, made: Branch) -> None:
        if made.position:
            made.produce()
            made.fork().save(self.folder / "again")


class KVFile(Reader):
    """`lm.kv.load`."""

    may = (errors.StoreError, errors.ContextOverflow, errors.KVFull)

    def make(self) -> None:
        self.names = ["kv.safetensors"]
        self.lm.kv.save([1, 2, 3, 4, 5], self.folder / "kv.safetensors")

    def change(self, data: bytes, name: str, rng: Random) -> bytes:
        length = int.from_bytes(data[:8], "little")
        if rng.random() < 0.3:
            return changed_bytes(data[: 8 + length + 64], rng) + data[8 + length + 64 :]
        header = json.loads(data[8 : 8 + length])
        metadata = header["__metadata__"]
        match rng.randrange(3):
            case 0:
                made = changed_json(json.dumps(header).encode(), rng)
            case 1:
                header["__metadata__"] = PLACE
                inner = changed_json(json.dumps(metadata).encode(), rng)
                made = json.dumps(header).encode().replace(f'"{PLACE}"'.encode(), inner)
            case _:
                key = rng.choice(["token_ids", "marks", "namespace"])
                inner = changed_json(metadata[key].encode(), rng)
                metadata[key] = inner.decode(errors="replace")
                made = json.dumps(header).encode()
        made += b" " * (-len(made) % 8)
        return len(made).to_bytes(8, "little") + made + data[8 + length :]

    def read(self) -> object:
        self.lm.clear_cache()
        return self.lm.kv.load(self.folder / "kv.safetensors")

    def use(self, made: Any) -> None:
        if made.depth:
            loom = Loom(self.lm, made.ids())
            loom.next(2)

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.FormatError)


class ResumeFile(Reader):
    """A search's `resume=`."""

    def make(self) -> None:
        for name in SMALL:
            file = self.folder / f"{name}.weft"
            with suppress(self.Stop):
                small(name, self.lm, samples.game24, resume=file, progress=self.stop)
            self.names.append(file.name)

    class Stop(Exception):
        pass

    def stop(self, level: search.Level) -> None:
        if level.depth == 2:
            raise self.Stop

    def trial(self, rng: Random) -> str:
        self.name = rng.choice(self.names)
        kept, self.names = self.names, [self.name]
        try:
            return super().trial(rng)
        finally:
            self.names = kept

    def change(self, data: bytes, name: str, rng: Random) -> bytes:
        if rng.random() < 0.2:
            return super().change(data, name, rng)
        # The search's own part is one entry of many.
        value = json.loads(data)
        part = json.loads(
            changed_json(json.dumps(value["nodes"][0]["meta"]["search"]).encode(), rng)
        )
        value["nodes"][0]["meta"]["search"] = part
        return json.dumps(value).encode()

    def read(self) -> object:
        file = self.folder / self.name
        with suppress(self.Stop):
            small(self.name.removesuffix(".weft"), self.lm, samples.game24, resume=file,
                  budget_s=2.0, progress=self.stop)  # fmt: skip
        return None

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.FormatError)


class SchemaFile(Reader):
    """`--json-schema`."""

    may = (errors.ConfigError, errors.GrammarError, errors.ConstraintError)

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

    def read(self) -> object:
        return options.constraint(self.folder / "schema.json")

    def use(self, made: Any) -> None:
        Loom(self.lm, samples.greeting).grow(1, max_tokens=2, seed=1, **made)

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.ConfigError)


class IndexFile(Reader):
    """The command's index and its looms: `weft ls`, and the loom drawn last."""

    may = (errors.StoreError,)

    def make(self) -> None:
        self.names = ["index.json", "looms/x.loom.json"]
        (self.folder / "looms").mkdir()
        loom = Loom(self.lm, [1, 2, 3])
        loom.add([4])
        loom.save(self.folder / "looms" / "x.loom.json")
        from weft.cli.shelf import Seen

        Shelf(self.folder).note("x", Seen(loom.id, [each.id for each in loom.walk()]))

    def read(self) -> object:
        from weft.cli.kept import Kept

        shelf = Shelf(self.folder)
        shelf.index()
        for name in shelf.names():
            shelf.summary(name)
        kept = Kept.open(shelf, shelf.own() or shelf.anybodys())
        kept.numbers()
        kept.note()
        return None

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.FormatError)


class ModelFolder(Reader):
    """`weft.load` of a folder with the NumPy engine."""

    engine = "numpy"
    may = (errors.EngineError, errors.ConfigError)
    config: dict[str, Any] = {}

    def make(self) -> None:
        tokenizer = byte_level(bos=True)
        write_folder(self.folder, {"vocab_size": 400, **self.config})
        tokenizer.save(str(self.folder / "tokenizer.json"))
        template = (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if loop.last %}!{% endif %}"
            "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
        )
        beside = {
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
        for name, value in beside.items():
            (self.folder / name).write_text(json.dumps(value, indent=1))
        (self.folder / "chat_template.jinja").write_text(template)
        self.names = ["config.json", "config.json", "tokenizer.json", "tokenizer.json"]
        self.names += ["model.safetensors", "chat_template.jinja", *beside]

    def change(self, data: bytes, name: str, rng: Random) -> bytes:
        if name.endswith(".safetensors"):
            return changed_tensors(data, rng)
        if name.endswith(".jinja") and rng.random() < 0.5:
            return rng.choice(TEMPLATES).encode()
        if name == "tokenizer_config.json" and rng.random() < 0.2:
            return json.dumps({"chat_template": rng.choice(TEMPLATES)}).encode()
        return super().change(data, name, rng)

    def read(self) -> object:
        return weft.load(self.folder, engine=self.engine)

    def use(self, made: weft.LM) -> None:
        with made as lm:
            ids = lm.tokenize("hello world")
            lm.detokenize(ids)
            if ids:
                Loom(lm, ids).grow(2, max_tokens=2, seed=1)
            lm.format_chat([{"role": "user", "content": "Hi"}])

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.ModelLoadError)


class TorchFolder(ModelFolder):
    """The same with the torch engine."""

    engine = "torch"


class SentencePieceFolder(ModelFolder):
    """A tokenizer of another family, the weights in shards."""

    def make(self) -> None:
        super().make()
        tokenizer = sentencepiece()
        tokenizer.save(str(self.folder / "tokenizer.json"))
        (self.folder / "model.safetensors").rename(self.folder / "model-1.safetensors")
        data = (self.folder / "model-1.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        names = [name for name in header if name != "__metadata__"]
        index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        self.names = ["tokenizer.json", "model-1.safetensors", "model.safetensors.index.json"]


class AdapterFolder(Reader):
    """`lm.add_adapter` with the torch engine."""

    may = (errors.EngineError, errors.ConfigError)

    def make(self) -> None:
        import numpy as np
        from safetensors.numpy import save_file

        self.names = ["adapter_config.json", "adapter_model.safetensors"]
        model = self.folder.parent / "adapted-model"
        if not model.exists():
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

    def change(self, data: bytes, name: str, rng: Random) -> bytes:
        if name.endswith(".safetensors"):
            return changed_tensors(data, rng)
        return super().change(data, name, rng)

    def read(self) -> object:
        self.torch_lm.add_adapter("a", self.folder)
        return None

    def must_name(self, error: BaseException) -> bool:
        return isinstance(error, errors.ModelLoadError)


TEMPLATES = [
    "",
    "{{",
    "{% for %}",
    "{{ messages[9].x.y }}",
    "{{ 'x' * 10 ** 10 }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "{{ '%1000000000d' % 1 }}{{ 1 // 0 }}",
    "{% include 'x' %}",
    "{{ messages | nothing }}",
    "{{ strftime_now(5) }}",
    "{{ raise_exception(5) }}",
    "\ufeff{{ messages[0]['content'] }}",
]


def changed_bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes that were torn, flipped, doubled, cut, or are something else altogether."""
    at, size = rng.randrange(len(data) + 1), rng.randrange(1, 64)
    match rng.randrange(12):
        case 0:
            return b""
        case 1:
            return data[:at]
        case 2:
            return data[at:]
        case 3 | 4 | 5:
            flipped = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 8])):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 6:
            return data[:at] + rng.randbytes(size) + data[at:]
        case 7:
            return data[:at] + data[at + size :]
        case 8:
            return data[:at] + data[at : at + size] * 2 + data[at + size :]
        case 9:
            return data[:at] + rng.choice([b"\xff\xfe", b"\x00", b"\xed\xa0\x80"]) + data[at:]
        case 10:
            return rng.choice([b"[", b'{"a":', b"("]) * 200_000
        case _:
            return rng.choice([rng.randbytes(2000), sys.executable.encode(), zlib.compress(data)])


def changed_tensors(data: bytes, rng: Random) -> bytes:
    """Return a safetensors file whose header says something else."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        made = changed_json(data[8 : 8 + length], rng)
        return len(made).to_bytes(8, "little") + made + data[8 + length :]
    return changed_bytes(data[: 8 + length], rng) + data[8 + length :]


def changed_json(data: bytes, rng: Random) -> bytes:
    """Return JSON with one to three of its values changed. Raises: ValueError for what is none."""
    value = json.loads(data)
    raws: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _changed_value(value, rng, raws)
    text = json.dumps(value)
    for raw in raws:
        text = text.replace(f'"{PLACE}"', raw, 1)
    if rng.random() < 0.05 and '"' in text:  # the same key again, with another value
        key = rng.choice([part for part in text.split('"')[1::2] if part] or ["x"])
        text = text.replace("{", f'{{"{key}": {json.dumps(rng.choice(VALUES))}, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _changed_value(root: Any, rng: Random, raws: list[str]) -> Any:
    holders: list[Any] = []
    stack = [root]
    while stack:
        each = stack.pop()
        if isinstance(each, dict | list) and each:
            holders.append(each)
            stack.extend(each.values() if isinstance(each, dict) else each)
    if not holders or rng.random() < 0.03:
        return copy.deepcopy(rng.choice(VALUES))
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match rng.randrange(12):
        case 0 | 1:
            del holder[key]
        case 2:
            if isinstance(holder, dict):
                holder[str(key) + rng.choice(["x", "_", " "])] = holder.pop(key)
            else:
                holder.append(holder[key])
        case 3 | 4:
            raws.append(rng.choice(RAW))
            holder[key] = PLACE
        case 5:
            other = rng.choice(holders)
            holder[key] = copy.deepcopy(
                rng.choice(list(other.values() if isinstance(other, dict) else other))
            )
        case 6:
            held = holder[key]
            holder[key] = [held] if rng.random() < 0.5 else {"x": held}
        case 7:
            held = holder[key]
            holder[key] = str(held) if not isinstance(held, str) else len(held)
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return root


def put(file: Path, data: bytes) -> None:
    """Make a file of these bytes, whatever is there."""
    clear(file)
    file.write_bytes(data)


def clear(file: Path) -> None:
    """Take away what is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


# What may stand where a file is expected.
KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: None,
    "folder": lambda file: file.mkdir(),
    "loop": lambda file: file.symlink_to(file.name),
    "dangling": lambda file: file.symlink_to("nothing-there"),
    "binary": lambda file: shutil.copyfile(sys.executable, file),
}
if os.name != "nt":
    KINDS |= {
        "pipe": lambda file: os.mkfifo(file),
        "zero": lambda file: file.symlink_to("/dev/zero"),
        "null": lambda file: file.symlink_to("/dev/null"),
        "sparse": lambda file: _sparse(file),
    }


def _sparse(file: Path) -> None:
    with file.open("wb") as out, suppress(OSError):  # where files cannot be that large
        out.truncate(1 << 43)


READERS: dict[str, type[Reader]] = {
    "loom": LoomFile,
    "branch": BranchFile,
    "kv": KVFile,
    "resume": ResumeFile,
    "schema": SchemaFile,
    "index": IndexFile,
    "model": ModelFolder,
    "sentencepiece": SentencePieceFolder,
    "torch": TorchFolder,
    "adapter": AdapterFolder,
}


def run(name: str, folder: Path, lm: weft.LM, n: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Change a reader's files n times; return what came, and what must not come."""
    folder.mkdir()
    reader = READERS[name](folder, lm)
    came, wrong = Counter[str](), list[str]()
    for trial in range(n):
        rng = Random(f"{name}/{seed}/{trial}")
        try:
            came[reader.trial(rng)] += 1
        except BaseException as error:  # panics of a library among them
            if isinstance(error, KeyboardInterrupt):
                raise
            trace = traceback.format_exc()
            wrong.append(f"{name} seed {seed} trial {trial}\n{trace}")
        reader.restore()
    return came, wrong


def main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))  # of the machine, not of a trial
    names, n, seed = sys.argv[1:]
    with weft.load("tiny") as lm, tempfile.TemporaryDirectory() as folder:
        for name in names.split(","):
            came, wrong = run(name, Path(folder) / name, lm, int(n), int(seed))
            for each in wrong:
                print(each)
            print(name, dict(came.most_common()), f"{len(wrong)} wrong", flush=True)


if __name__ == "__main__":
    main()
