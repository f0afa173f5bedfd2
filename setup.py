"""Puts the migrations, which lie at the root of a checkout, inside the installed package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithMigrations(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            inside = Path(self.build_lib) / "meshpoint" / "adapters" / "sql" / "alembic"
            shutil.rmtree(inside, ignore_errors=True)
            shutil.copytree("alembic", inside, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithMigrations})
