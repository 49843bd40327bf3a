"""For tools that call setup.py; setup.cfg holds the metadata."""

from setuptools import setup

setup()
