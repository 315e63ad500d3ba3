"""``privatellm serve``: the model behind HTTP, in the protocols of OpenAI and Anthropic. A front end like the screen.

starlette and uvicorn are imported here and nowhere else.
"""
