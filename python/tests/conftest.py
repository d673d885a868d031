import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # attention_math.py, also in processes that tests start
