#!/bin/sh
# What has to pass before anybody reads a pull request.
set -e
python3 -B -m unittest -v
