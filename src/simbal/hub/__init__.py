"""Trained models in the folder format of Hugging Face, written (`export`) and read (`load`)."""

from simbal.hub.pretrained import load

__all__ = ["load"]
