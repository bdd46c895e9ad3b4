"""The parity study: does it train as well as data-parallel? `make parity` runs it and writes docs/parity.md."""
