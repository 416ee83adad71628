"""Torture: a real daemon under real load, killed again and again, and what it still owes"""
