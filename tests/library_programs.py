"""Programs that work on a database concurrently, or until they are killed.

Each is the code of a process (`forks`); it prints the nodes and tokens that are saved.
"""

GROW = """
import sys
from weft.service.store.library import Library
url, name, me, turns = sys.argv[1:]
with Library(url) as library:
    kept = library.open(name)
    for turn in range(int(turns)):
        nodes = list(kept.loom.walk())
        node = nodes[(int(me) * 7 + turn * 3) % len(nodes)].add(f"{me}:{turn}")
        kept.commit("grow")
        print(kept.number(node), node.id, flush=True)
"""

CREATE = """
import sys
from weft.loom import Loom
from weft.service.store.library import Library
with Library(sys.argv[1]) as library:
    print(library.create(Loom(None, "the same prompt")).name)
"""

# A node at a time, three tokens at once; what is printed was kept before.
STREAM = """
import sys
from weft.loom.node import child_list, growing_lists, new_child, set_text
from weft.service.store.library import Library
url, name = sys.argv[1:]
kept = Library(url).open(name)
while True:
    node = new_child(kept.loom)
    for piece in range(4):
        tokens, logprobs, entropies, _ = growing_lists(node)
        first = len(tokens)
        tokens.extend(range(first, first + 3))
        logprobs.extend(-0.5 * each for each in range(first, first + 3))
        entropies.extend(0.25 for _ in range(3))
        kept.append([node])
        print(node.id, len(tokens), "growing", flush=True)
    node.finish_reason = "length"
    set_text(node, "a text of no tokenizer")
    child_list(kept.loom).append(node)
    kept.commit("grow")
    print(node.id, len(tokens), "length", flush=True)
"""

# Says when it holds the loom's node growing, and waits.
HOLD = STREAM.replace("while True:", "for _ in range(1):").replace(
    "    node.finish_reason", "    sys.stdin.read(1)\n    node.finish_reason"
)

FULL = """
import os, resource, sys
from weft.errors import StoreError
from weft.service.store.library import Library
url, name, file = sys.argv[1:]
kept = Library(url).open(name)
size = os.path.getsize(file)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200_000, resource.RLIM_INFINITY))
kept.loom.add("x" * 5_000_000)
try:
    kept.commit("add")
except StoreError as error:
    print(error.hint)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept.loom.add("there is room again")
print(len(kept.commit("add").added))
"""

READ_ONLY = """
import os, sys
from weft.errors import StoreError
from weft.loom import Loom
from weft.service.store.library import Library
url, folder = sys.argv[1:]
library = Library(url)
kept = library.create(Loom(None, "x"))
kept.loom.add("y")
library.close()
os.chmod(folder, 0o555)
for name in os.listdir(folder):
    os.chmod(os.path.join(folder, name), 0o444)
if os.geteuid() == 0:
    os.setuid(65534)
try:
    kept.commit("add")
except StoreError as error:
    print(error, error.hint)
"""

FORK = """
import os, sys
from weft.service.store.library import Library
url, name = sys.argv[1:]
library = Library(url)
kept = library.open(name)
kept.loom.add("before")
kept.commit("add")
child = os.fork()
kept.loom.add("child" if child == 0 else "parent")
kept.commit("add")
if child:
    os.waitpid(child, 0)
    library.close()
else:
    library.close()
    os._exit(0)
"""
