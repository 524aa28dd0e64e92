"""Tests of the ops; a package, so that they share `oracle`."""
