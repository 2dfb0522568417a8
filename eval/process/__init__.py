"""Processes: outcomes, the isolated child, the cell, the process tree. The lowest layer"""
