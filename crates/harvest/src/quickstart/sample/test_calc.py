"""What the calculator promises."""

import unittest

from calc import add, double


class Calculator(unittest.TestCase):
    def test_adds(self):
        self.assertEqual(add(2, 3), 5)

    def test_doubles(self):
        self.assertEqual(double(4), 8)


if __name__ == "__main__":
    unittest.main()
