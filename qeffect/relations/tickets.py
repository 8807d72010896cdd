"""
Tickets: every check issues the next serial number, so no commit can redeem another check's
ticket.
"""

from __future__ import annotations

from .columns import Column
from .constants import State

#: ``serial`` is the number of the last ticket issued. It never decreases, not even at a restore.
STATE = {"serial": Column("one")}


def check_refresh_writes(st: State, stage, link):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket


def check_evaluation_writes(st: State, stage, link, cached):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket


def check_forward_writes(st: State, key, slot, token, link, refresh):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket


def check_dgrad_writes(st: State, key, ref, token, link):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket


def check_wgrad_writes(st: State, key, ref, link, destination, first):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket


def check_update_writes(st: State, epoch, caller):
    ticket = st.serial[0] + 1
    st.serial[0] = ticket
