"""A contract for import-linter: other packages import from a package, not from its modules."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Encapsulated(Contract):
    """A module is imported only in its own package, in subpackages and in parents of that; `public` modules anywhere.

    What a package offers to others stands in its `__init__.pyi` or `__init__.py`.
    """

    importers = fields.SetField(subfield=fields.StringField())
    public = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        wrong = sorted(
            (importer, imported)
            for importer in graph.modules
            if importer.partition(".")[0] in self.importers
            for imported in graph.find_modules_directly_imported_by(importer)
            if not graph.is_module_squashed(imported)  # of another distribution
            and not graph.find_children(imported)
            and imported not in self.public
            and not _are_related(_package_of(graph, importer), imported.rpartition(".")[0])
        )
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        wrong: list[Any] = check.metadata["wrong"]
        for importer, imported in wrong:
            package = imported.rpartition(".")[0]
            output.print_error(
                f"{importer} imports {imported}: import the name from {package}, and list it in {package}/__init__.pyi"
            )


def _package_of(graph: ImportGraph, module: str) -> str:
    return module if graph.find_children(module) else module.rpartition(".")[0]


def _are_related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")
