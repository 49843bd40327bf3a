"""Setuptools' entry point; everything is said in setup.cfg."""

from setuptools import setup

setup()
