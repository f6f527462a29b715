"""A third-party package that only some modules may import."""

from __future__ import annotations

from typing import cast

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Confined(Contract):
    """Options `external` (top-level third-party name) and `homes` (packages that may import it).

    Every other module must reach it through a home. A home need not exist yet. Imports inside functions
    count too. Needs `include_external_packages`.
    """

    type_name = "confined"

    external = fields.StringField()
    homes = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        external, homes = cast(str, self.external), cast("list[str]", self.homes)
        importers = graph.find_modules_that_directly_import(external) if external in graph.modules else set()
        strays = sorted(
            importer
            for importer in importers
            if not any(importer == home or importer.startswith(f"{home}.") for home in homes)
        )
        return ContractCheck(kept=not strays, metadata={"strays": strays})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer in check.metadata["strays"]:
            output.print_error(f"{importer} imports {self.external}, allowed only in {self.homes}")
