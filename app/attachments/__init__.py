"""Text files and pictures that go with a question: reading, naming and finding them, and what a model gets of them."""
