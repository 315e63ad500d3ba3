"""``bench exchange``: what one exchange costs through every transport, between processes on this machine.

Each node is a process with a certificate of its own; the links are those of a ring, on loopback. All transports are
measured in turns in the same run, so that what else the machine does meanwhile falls on all of them.
"""

from __future__ import annotations

import hashlib
import secrets
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from discovery.certificates import make_certificate
from engine.bench.exchange_node import (
