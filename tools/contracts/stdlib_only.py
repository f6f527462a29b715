"""A package that may import the standard library and itself, and nothing else, anywhere."""

from __future__ import annotations

import sys
from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StdlibOnly(Contract):
    """Option `package`: the package whose modules import only the standard library and each other.

    Imports inside functions count too. Needs `include_external_packages`.
    """

    type_name = "stdlib_only"

    package = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        package = cast(str, self.package)
        own = {package} | graph.find_descendants(package)
        foreign = sorted(
            (module, imported)
            for module in own
            for imported in graph.find_modules_directly_imported_by(module)
            if imported not in own and imported.partition(".")[0] not in sys.stdlib_module_names
        )
        return ContractCheck(kept=not foreign, metadata={"foreign": foreign})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for module, imported in check.metadata["foreign"]:
            output.print_error(f"{module} imports {imported}, which is not in the standard library")
