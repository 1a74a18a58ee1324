"""The federation of three clients that the tests of the network have."""

from ..flower.conftest import impatient as impatient
from ..flower.conftest import keys as keys
from ..flower.conftest import setting as setting
from ..flower.conftest import undisturbed as undisturbed
