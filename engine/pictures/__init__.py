"""Pictures as a model sees them: which tokens a picture becomes, and where those stand.

The life of a picture: ``decoding`` makes a :class:`~engine.pictures.picture.Picture` of a file's bytes. The session
asks :func:`~engine.pictures.folders.read_sight` how the model sees; None is a model that sees no pictures. The chat
template writes one :attr:`~engine.pictures.sight.Sight.placeholder` for a picture, which becomes as many tokens as its
:class:`~engine.pictures.sight.Grid` has. The model's tower turns the picture into that many rows, which stand in place
of embeddings.
"""
