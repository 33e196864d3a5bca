"""Decoder layers in C for CPUs, compiled by the machine's own compiler when they are first needed.

A round on a CPU is some hundred small operations, and launching them from Python takes longer than most of them do.
Here the layers of a model are one call. Without a compiler, or with FLEDGE_NATIVE=0, torch does the same work.
"""
