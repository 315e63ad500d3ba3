"""The tests, in the tree of what they test: each package has its folder, each module its file."""
