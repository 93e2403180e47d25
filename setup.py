"""Build without what an earlier build has left in ``build/``; all else stands in setup.cfg."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class FreshBuild(build_py):
    """Copy the package into an empty folder: setuptools packs whatever it finds there, of earlier releases too."""

    def run(self) -> None:
        """Empty the folder, then build as usual."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": FreshBuild})
