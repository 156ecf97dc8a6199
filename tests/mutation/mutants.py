"""The mutants of a module: small changes by Cosmic Ray's operators, as text.

Left out is what no test can or should notice: assertions, which never fail in a right program; the
wording of errors; types; whether a dataclass is frozen; whether identity or equality is asked,
which are the same for None, enums, dtypes and small numbers; the random operands that an operation
is tried with; and how far it may be from the exact result.
"""

import ast
import re
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

#: Nodes of parso's tree inside which nothing is changed.
_LEFT_OUT = {"assert_stmt", "raise_stmt", "annassign", "tfpdef"}
#: Functions and classes that draw operands.
_SAMPLES = re.compile("_?[Ss]ampl.*")
#: Where a statement begins: what a test ran of it is told by its lines.
_STATEMENTS = {"simple_stmt", "funcdef", "classdef", "decorator"}
#: Operators whose changes change nothing.
_SAME = re.compile(r"core/ReplaceComparisonOperator_(Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot)")


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of one file."""

    #: relative to the repository
    path: str
    #: of the change
    line: int
    #: Cosmic Ray's name of the operator, and which of its places
    operator: str
    occurrence: int
    #: where the statement begins
    first: int

    def text(self, root: Path) -> str:
        """Return the whole file with the change."""
        source = (root / self.path).read_text(encoding="utf-8")
        changed = mutate_code(source, get_operator(self.operator)(), self.occurrence)
        assert changed is not None
        return changed

    def compiles(self, root: Path) -> bool:
        """Tell whether it is still Python: ``a * not b`` is not."""
        try:
            ast.parse(self.text(root))
        except SyntaxError:
            return False
        return True

    def diff(self, root: Path) -> tuple[str, ...]:
        """Return the lines that go, with a minus, and those that come, with a plus."""
        before = (root / self.path).read_text(encoding="utf-8").splitlines()
        lines = unified_diff(before, self.text(root).splitlines(), n=0, lineterm="")
        return tuple(
            " ".join(x.split()) for x in lines if x[:3] not in ("---", "+++") if x[0] in "+-"
        )


def mutants_of(path: str, root: Path) -> list[Mutant]:
    """Return all mutants of a file, in the order of its lines."""
    tree = get_ast((root / path).read_text(encoding="utf-8"))
    found = []
    for name in operator_names():
        if _SAME.fullmatch(name) or get_operator(name).arguments():
            continue
        operator = get_operator(name)()
        places = (node for node in ast_nodes(tree) for _ in operator.mutation_positions(node))
        found += [
            Mutant(path, node.start_pos[0], name, occurrence, _first_line(node))
            for occurrence, node in enumerate(places)
            if not _is_left_out(node)
        ]
    return sorted(found)


def _is_left_out(node):
    if node.type in {"if_stmt", "while_stmt"}:
        condition = node.children[1]
        if getattr(condition, "value", "") == "TYPE_CHECKING" or condition.type == "namedexpr_test":
            return True
    # Of f(*values), {**values} or f(a, /): with another operator it would not compile.
    if getattr(node, "value", "") in {"*", "**", "/"} and node.parent.type not in {"term", "power"}:
        return True
    while node.parent is not None:
        above = node.parent
        if above.type in _LEFT_OUT or (above.type == "decorator" and node.type != "operator"):
            return True
        if above.type in {"param", "funcdef"} and node is above.annotation:
            return True
        if _names_a_type(node) or _is_of_trials(above):
            return True
        node = above
    return False


def _is_of_trials(node):
    """Tell a function that draws operands, and what a Budget grants."""
    if node.type in {"funcdef", "classdef"}:
        return _SAMPLES.fullmatch(node.name.value) is not None
    return node.type == "atom_expr" and getattr(node.children[0], "value", "") == "Budget"


def _names_a_type(node):
    """Tell ``Name = A | B`` at the top of a module, which is a type, by its capital letter."""
    statement = node.parent
    return (
        statement.type == "expr_stmt"
        and statement.children[0].type == "name"
        and statement.children[0].value.lstrip("_")[0].isupper()
        and not statement.children[0].value.isupper()
    )


def _first_line(node):
    while node.parent is not None and node.type not in _STATEMENTS:
        if node.type.endswith("_stmt") and node.parent.type != "simple_stmt":
            break
        node = node.parent
    return node.start_pos[0]
