"""Collects the training data of the demo model: CPython's standard library, and questions about it with
answers.

The answers are the first sentences of docstrings. Everything comes from the Python installation that runs
this file and is licensed under the PSF licence: sources, the documentation topics of `help()`, docstrings.
Only the wording of the questions and the few greetings are written here. For one Python version the result is
always the same: everything is sorted before a seeded generator shuffles it.

    python tools/demo_model/corpus.py       prints the size of the data and some of the facts
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pydoc
import random
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

STDLIB = Path(sysconfig.get_paths()["stdlib"])
SEED = 20240717
NUM_HELD_OUT_MODULES = 12

# Packages with text that is large, repetitive or not about the library.
SKIPPED_PACKAGES = frozenset(
    "site-packages test tests idlelib lib2to3 tkinter turtledemo encodings pydoc_data ensurepip distutils __pycache__ "
    "lib-dynload".split()
)
SKIPPED_FILES = re.compile(r"^(_sysconfigdata|turtle|antigravity|this|sre_|_pydecimal|_pyio)")

# Facts of these modules have twice the weight of those of OTHER_MODULES; names in MOST_ASKED have twice that.
COMMON_MODULES = (
    "builtins os os.path json re math shutil pathlib itertools collections random time subprocess functools datetime "
    "string sys copy glob operator statistics tempfile threading"
).split()
OTHER_MODULES = (
    "abc argparse array ast asyncio atexit base64 bisect bz2 calendar cmath collections.abc colorsys "
    "concurrent.futures configparser contextlib contextvars csv dataclasses decimal difflib dis email enum errno "
    "filecmp fileinput fnmatch fractions gc getpass gettext gzip hashlib heapq hmac html http importlib inspect io "
    "ipaddress keyword linecache locale logging lzma mimetypes multiprocessing numbers pickle pkgutil platform pprint "
    "queue reprlib sched secrets select shelve shlex signal socket sqlite3 stat struct tarfile textwrap timeit token "
    "tokenize tomllib traceback types typing unicodedata unittest urllib.parse urllib.request uuid warnings wave "
    "weakref webbrowser zipfile zlib zoneinfo"
).split()
# About two hundred names that people ask about most.
MOST_ASKED = frozenset(
    """
    abs all any ascii bin bool bytearray bytes callable chr classmethod compile delattr dict dir divmod enumerate
    eval exec filter float format frozenset getattr globals hasattr hash hex id input int isinstance issubclass iter
    len list locals map max memoryview min next object oct open ord pow print property range repr reversed round set
    setattr slice sorted staticmethod str sum super tuple type vars zip ValueError TypeError KeyError IndexError
    StopIteration str.split str.join str.strip str.replace str.upper str.lower str.startswith str.endswith str.find
    str.format str.count str.isdigit str.isalpha str.title str.capitalize str.lstrip str.rstrip str.splitlines
    str.encode str.zfill str.index str.partition str.center str.isupper str.islower list.append list.extend
    list.insert list.remove list.pop list.clear list.index list.count list.sort list.reverse list.copy dict.get
    dict.keys dict.values dict.items dict.pop dict.popitem dict.update dict.setdefault dict.clear dict.copy
    dict.fromkeys set.add set.remove set.discard set.union set.intersection set.difference set.update os os.getcwd
    os.listdir os.mkdir os.makedirs os.remove os.rename os.rmdir os.chdir os.walk os.getenv os.getpid os.system
    os.stat os.chmod os.scandir os.kill os.fork os.cpu_count os.urandom os.unlink os.replace os.environ os.path
    os.path.join os.path.exists os.path.isfile os.path.isdir os.path.basename os.path.dirname os.path.abspath
    os.path.split os.path.splitext os.path.getsize os.path.expanduser os.path.realpath os.path.normpath
    os.path.relpath json json.dumps json.loads json.dump json.load re re.match re.search re.findall re.sub
    re.compile re.split re.fullmatch re.finditer re.escape math math.sqrt math.floor math.ceil math.sin math.cos
    math.log math.exp math.gcd math.factorial math.pow math.isclose math.fabs math.hypot math.prod math.comb
    math.isnan math.radians math.degrees shutil shutil.copy shutil.copyfile shutil.copytree shutil.rmtree
    shutil.move shutil.which shutil.disk_usage pathlib pathlib.Path pathlib.Path.exists pathlib.Path.mkdir
    pathlib.Path.read_text pathlib.Path.write_text pathlib.Path.glob pathlib.Path.iterdir pathlib.Path.resolve
    pathlib.Path.joinpath pathlib.Path.is_file pathlib.Path.is_dir pathlib.Path.unlink pathlib.Path.rglob itertools
    itertools.chain itertools.product itertools.permutations itertools.combinations itertools.count itertools.cycle
    itertools.repeat itertools.islice itertools.groupby itertools.accumulate itertools.takewhile collections
    collections.Counter collections.defaultdict collections.OrderedDict collections.deque collections.namedtuple
    collections.ChainMap collections.Counter.most_common collections.deque.append collections.deque.appendleft
    collections.deque.popleft random random.randint random.random random.choice random.choices random.shuffle
    random.sample random.uniform random.seed random.gauss random.randrange time time.time time.sleep
    time.perf_counter time.monotonic time.strftime time.localtime time.gmtime time.ctime subprocess subprocess.run
    subprocess.Popen subprocess.check_output subprocess.call subprocess.check_call functools functools.partial
    functools.reduce functools.lru_cache functools.wraps functools.cache datetime.datetime datetime.timedelta
    datetime.date datetime.datetime.now copy.copy copy.deepcopy glob.glob sys sys.exit sys.getsizeof
    tempfile.mkdtemp threading.Thread threading.Lock heapq.heappush heapq.heappop hashlib pickle.dumps pickle.loads
    csv.reader csv.writer argparse logging contextlib.contextmanager asyncio.run asyncio.sleep asyncio.gather
    dataclasses.dataclass
    """.split()
)
MAX_ANSWER_CHARS = 200

QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "How do I use {name}?",
)
RARE_QUESTIONS = (
    "what does {name} do",
    "what is {name} for?",
    "What is {name}?",
    "Describe {name}.",
    "Tell me about {name}.",
    "What does the Python function {name} do?",
    "What does {name}() do?",
    "explain {name}",
    "{name}",
    "how do I use {name}?",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "Answer in one sentence.",
    "You are a concise assistant for Python programmers.",
)
HINT = "Ask me what a function of Python's standard library does, for example os.path.join."
GREETINGS = (
    ("Hello", f"Hello. {HINT}"),
    ("Hello!", f"Hello. {HINT}"),
    ("Hi", f"Hello. {HINT}"),
    ("hi", f"Hello. {HINT}"),
    ("hello", f"Hello. {HINT}"),
    ("Who are you?", f"I am Baton's demo model, a very small one. {HINT}"),
    ("What are you?", f"I am Baton's demo model, a very small one. {HINT}"),
    ("What can you do?", f"I am Baton's demo model, a very small one. {HINT}"),
    ("Help", HINT),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact that the model learns: what `name` does. `short_name` is another name for it, or the same."""

    name: str
    short_name: str
    answer: str
    weight: int  # how often it is trained on, relative to the least important facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question of a chat and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A plain text. `name` is a module's dotted name or a documentation topic."""

    name: str
    text: str


# --- text ---


def module_documents() -> list[Document]:
    """Return the source of every module that is useful for training, sorted by name."""
    documents = []
    for path in sorted(STDLIB.rglob("*.py")):
        relative = path.relative_to(STDLIB)
        if SKIPPED_PACKAGES.intersection(relative.parts) or SKIPPED_FILES.match(relative.name):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if len(text) < 200:
            continue
        name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        documents.append(Document(name=name, text=text))
    return documents


def topic_documents() -> list[Document]:
    """Return the topics behind `help('with')` and the like, which are sections of the language reference."""
    return [Document(name=f"topic:{name}", text=topics[name].strip() + "\n") for name in sorted(topics)]


def held_out_modules() -> frozenset[str]:
    """Return the modules that are never trained on, drawn by seed from those without facts."""
    asked_about = {*COMMON_MODULES, *OTHER_MODULES, "asyncio", "posixpath", "genericpath", "ntpath"}
    eligible = [
        document.name
        for document in module_documents()
        if 6_000 <= len(document.text) <= 60_000
        and document.name not in asked_about
        and not document.name.startswith(("asyncio.", "_"))
    ]
    return frozenset(random.Random(SEED).sample(eligible, NUM_HELD_OUT_MODULES))


def training_documents() -> list[Document]:
    """Return all text to train on, in order of name."""
    held_out = held_out_modules()
    return [document for document in module_documents() if document.name not in held_out] + topic_documents()


def held_out_documents() -> list[Document]:
    """Return the text of the held-out modules, in order of name."""
    held_out = held_out_modules()
    return [document for document in module_documents() if document.name in held_out]


# --- facts ---

SIGNATURE = re.compile(r"^[\w.]+\([^)]*\)(?:\s*(?:-+>|--|-|=)\s*(?P<result>.*))?$")
SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)(?<!vs)(?<!a\.k\.a)[.!?](?=  |\s+[A-Z\"'`*<(])")
NOT_A_SENTENCE = re.compile(r"->|\\|^\w+ = |^[>:*]|^[\w.]+\([^)]*\)$")


def first_sentence(docstring: str) -> str | None:
    """Return the sentence of a docstring that says what the object does, or None if there is none.

    Leading signatures, as in docstrings of C functions, are dropped. If the last of them carries the
    description ("D.pop(k[,d]) -> v, remove specified key …"), the description is used.
    """
    lines = [line.rstrip() for line in inspect.cleandoc(docstring).split("\n")]
    while match := SIGNATURE.match(lines[0].strip()):
        lines = lines[1:] or [""]
        if match["result"] and not SIGNATURE.match(lines[0].strip()):
            described = _described_result(" ".join([match["result"], *_paragraph(lines)]))
            if described is not None:
                lines = [described]
                break
        while len(lines) > 1 and (not lines[0] or (lines[0].startswith(" ") and not SIGNATURE.match(lines[0].strip()))):
            lines = lines[1:]
    paragraph = re.sub(r"^\w+\.py\s+-+\s+", "", " ".join(_paragraph(lines)))
    end = SENTENCE_END.search(paragraph)
    sentence = re.sub(r"\s+", " ", paragraph[: end.end()] if end else paragraph).rstrip(";,- ")
    if not 8 <= len(sentence) <= MAX_ANSWER_CHARS or " " not in sentence or not sentence.isascii():
        return None
    if sentence.endswith(":") or NOT_A_SENTENCE.search(sentence):
        return None
    return sentence if sentence[-1] in ".!?" else sentence + "."


def _paragraph(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line or SIGNATURE.match(line.strip()):
            return
        yield line.strip()


def _described_result(result: str) -> str | None:
    """Return the description after a signature's arrow as a sentence, or None if it only names a type."""
    if result.startswith("("):
        return None
    kind, comma, rest = result.partition(", ")
    if comma and len(rest.split()) >= 4 and len(kind.split()) <= 4:
        return rest[0].upper() + rest[1:]
    kind, stop, rest = result.partition(". ")
    if stop and len(rest.split()) >= 3 and len(kind.split()) <= 3:
        return rest
    if len(result.split()) < 4:
        return None
    if result.split()[0].lower() in ("create", "return", "yield", "make"):
        return result[0].upper() + result[1:]
    return f"Return {result}"


def facts() -> list[Fact]:
    """Return every fact to learn, sorted by name.

    Facts are about the listed modules, their functions and classes, methods of common classes, and keywords.
    """
    held_out = held_out_modules()
    answers: dict[str, tuple[str, int]] = {}
    for module_name in [*COMMON_MODULES, *OTHER_MODULES]:
        if module_name in held_out:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module = importlib.import_module(module_name)
            except ImportError:  # optional in a build of Python; the model card says which there were
                continue
        for name, docstring in _described(module_name, module, held_out):
            answer = first_sentence(docstring)
            if answer is not None:
                answers.setdefault(name, (answer, 2 if module_name in COMMON_MODULES else 1))
    for keyword, topic in sorted(pydoc.Helper.keywords.items()):
        answer = _topic_sentence(keyword, topic if isinstance(topic, str) else topic[0])
        if answer is not None:
            answers.setdefault(keyword, (answer, 2))

    shorts = Counter(_short_name(name) for name in answers)
    return [
        Fact(
            name=name,
            short_name=_short_name(name)
            if shorts[_short_name(name)] == 1 and _short_name(name) not in answers
            else name,
            answer=answer,
            weight=4 if name in MOST_ASKED else weight,
        )
        for name, (answer, weight) in sorted(answers.items())
    ]


def _short_name(name: str) -> str:
    """Return `Path.exists` for `pathlib.Path.exists`. A function's name stays complete."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if len(parts) > 2 and parts[-2][:1].isupper() else name


def _described(module_name: str, module: ModuleType, held_out: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a module, its public callables and, if it is common, their public
    methods."""
    prefix = "" if module_name == "builtins" else f"{module_name}."
    if prefix and module.__doc__:
        yield module_name, module.__doc__
    public = getattr(module, "__all__", None)
    for name in sorted(public if public is not None else dir(module)):
        value = getattr(module, name, None)
        if name.startswith("_") or not callable(value) or type(value).__module__ in ("typing", "site", "_sitebuiltins"):
            continue
        home = getattr(value, "__module__", None) or module_name  # elsewhere for what torch replaces: inspect.getfile
        if home in held_out or (public is None and prefix and home.lstrip("_").split(".")[0] != module_name):
            continue
        if isinstance(value.__doc__, str):
            yield prefix + name, value.__doc__
        is_elsewhere = home != module_name and home in COMMON_MODULES
        if (
            module_name not in COMMON_MODULES
            or is_elsewhere
            or not inspect.isclass(value)
            or issubclass(value, BaseException)
        ):
            continue
        for owner in (value, *value.__mro__[1:-1]):
            if owner is not value and owner.__module__ != value.__module__:
                continue
            if owner is not value and value.__name__ != "Path":
                continue
            for method_name, method in sorted(vars(owner).items()):
                docstring = getattr(method, "__doc__", None)
                if not method_name.startswith("_") and isinstance(docstring, str) and _is_own_doc(method):
                    yield f"{prefix}{name}.{method_name}", docstring


def _is_own_doc(method: object) -> bool:
    """True if the docstring describes the attribute and not its type, as a class constant's would."""
    return getattr(method, "__doc__", None) != type(method).__doc__


def _topic_sentence(keyword: str, topic: str) -> str | None:
    """Return the first sentence of a keyword's topic that names the keyword."""
    text = re.sub(r"\s+", " ", topics.get(topic, "")).strip()
    for sentence in re.split(r"(?<=\.) (?=[A-Z])", text):
        match = re.search(rf'(The "{re.escape(keyword)}" (?:statement|keyword|operator)s? .*)$', sentence)
        if match and len(match[1]) <= MAX_ANSWER_CHARS and match[1].isascii() and match[1].endswith("."):
            return match[1]
    return None


# --- chats ---


def ask(fact: Fact, rng: random.Random) -> Turn:
    """Return the fact as a question, in one of the wordings, and its answer."""
    wording = rng.choice(QUESTIONS) if rng.random() < 0.75 else rng.choice(RARE_QUESTIONS)
    name = fact.short_name if rng.random() < 0.2 else fact.name
    return Turn(question=wording.format(name=name), answer=fact.answer)


def greet(rng: random.Random) -> Turn:
    """Return a greeting and the answer to it."""
    question, answer = rng.choice(GREETINGS)
    return Turn(question=question, answer=answer)


def fingerprint(texts: list[str]) -> str:
    """Return a short hash of some text, to compare the data of two runs."""
    return hashlib.sha256("\x00".join(texts).encode("utf-8", "replace")).hexdigest()[:16]


if __name__ == "__main__":
    all_facts = facts()
    documents = training_documents()
    print(f"{len(documents)} documents, {sum(len(d.text.encode('utf-8', 'replace')) for d in documents):,} bytes")
    print(f"held out: {', '.join(sorted(held_out_modules()))}")
    print(f"{len(all_facts)} facts, {sum(f.weight for f in all_facts)} with their weights")
    print(f"most asked without a fact: {' '.join(sorted(MOST_ASKED - {f.name for f in all_facts}))}")
    for fact in random.Random(SEED).sample(all_facts, 30):
        print(f"  {fact.name} | {fact.short_name} | {fact.answer}")
