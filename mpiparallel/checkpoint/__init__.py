"""Sharded checkpoints: written by all ranks at once, loaded onto any mesh.

boxes.py      what a rank holds and what a file holds, as boxes of global arrays
manifest.py   what is in which file, as JSON that is believed only after it is checked
files.py      folders, the newest one, complete or not there at all
save.py       every rank writes what it owns
load.py       every rank reads the slices that it holds
gpt2.py       one file in Hugging Face's names for GPT-2, in and out
"""
