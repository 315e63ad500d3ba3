"""Exchanges over gloo and mx.distributed: the contract of all exchanges, and what their engines cannot do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linked_nodes import LinkedNode, LinkedNodes
from memory_exchange import MemoryRing, must_succeed, on_all_ranks

from discovery import certificates
