"""Installs the top-level `conf/` folder inside the package; all else is in pyproject.toml.

pyproject.toml can find packages or map one to another folder, not both, and a written-out list of packages is
forgotten at the first new folder.
"""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["tpu_train", "tpu_train.*", "hydra_plugins"]), "tpu_train.conf"],
    package_dir={"tpu_train.conf": "conf"},
    package_data={"tpu_train.conf": ["*.yaml", "**/*.yaml"]},
)
