"""A service answers under its own names only, so that no other site can read it."""

import argparse
import re

import pytest

from hvt.cli.flags import add_fields, given_fields
from hvt.errors import HVTError
from hvt.serve.middleware import AllowedHosts
from hvt.serve.settings import Settings


@pytest.mark.parametrize(
    ("settings", "host", "allowed"),
    [
        ({}, "localhost", True),
        ({}, "LocalHost:8000", True),
        ({}, "app.localhost.", True),
        ({}, "127.0.0.1:8000", True),
        ({}, "127.3.2.1", True),
        ({}, "[::1]:8000", True),
        ({}, "evil.example", False),
        ({}, "evil.example:8000", False),
        ({}, "localhost.evil.example", False),
        ({}, "127.0.0.1.evil.example", False),
        ({}, "192.168.1.5", False),
        ({}, "", False),
        ({}, "[::1", False),
        ({}, "[::1]evil.example", False),
        ({}, "[localhost]", False),
        ({}, "localhost:80@evil.example", False),
        ({}, "localhost:evil", False),
        ({}, " localhost", False),
        ({"host": "192.168.1.5"}, "192.168.1.5:80", True),
        ({"host": "192.168.1.5"}, "192.168.1.6", False),
        ({"host": "Hvt.lan"}, "hvt.lan", True),
        ({"host": "0.0.0.0"}, "192.168.1.5", True),
        ({"host": "::"}, "[2001:db8::1]:80", True),
        ({"host": "0.0.0.0"}, "evil.example", False),
        ({"allow_host": ("Hvt.Example", "other")}, "hvt.example:443", True),
        ({"allow_host": ("hvt.example",)}, "www.hvt.example", False),
        ({"allow_host": ("*",)}, "evil.example", True),
    ],
)
def test_hosts_that_are_allowed(settings: dict, host: str, allowed: bool) -> None:
    assert AllowedHosts(Settings(**settings)).allows(host.encode()) == allowed


def test_the_flag_is_given_for_each_name() -> None:
    parser = argparse.ArgumentParser()
    add_fields(parser, Settings)
    args = parser.parse_args(["--allow-host", "example.com", "--allow-host", "x,y.example"])
    with pytest.raises(HVTError, match=re.escape("allow_host='x,y.example' must be a name")):
        Settings(**given_fields(args, Settings))
    args = parser.parse_args(["--allow-host", "example.com", "--allow-host", "b"])
    assert Settings(**given_fields(args, Settings)).allow_host == ("example.com", "b")
