"""What a person touches: the command line and the screen. Imports no torch, mlx, transformers or grpc."""
