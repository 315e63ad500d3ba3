"""Text files and pictures that go with a question: reading, naming and finding them, and the form in which a model gets them."""
