"""The program's user interface: the command line and the screen. Imports no torch, mlx, transformers or grpc."""
