"""What pyproject.toml cannot say: the recipes of ``params/`` travel in the wheel, as ``fedlib/params/``."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fedlib", "fedlib.*", "fedlib_lab", "fedlib_lab.*"]), "fedlib.params"],
    package_dir={"fedlib.params": "params"},
)
