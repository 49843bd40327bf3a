"""The option ``app``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase

from replication.errors import ConfigError
from replication.follower.app_module import register_app
from replication.follower.worker import Worker


class AppTests(SynchronousTestCase):
    """``--app MODULE[:NAME]``."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.addCleanup(os.chdir, Path.cwd())
        os.chdir(self.folder)
        self.patch(sys, "path", [each for each in sys.path if each])
        self.worker = Worker(database="sqlite://", reactor=MemoryReactorClock())

    def app(self, name: str, text: str) -> None:
        """Write a module into the current directory."""
        (self.folder / f"{name}.py").write_text(text)
        self.addCleanup(sys.modules.pop, name, None)

    def refusal(self, app: str) -> str:
        return str(self.assertRaises(ConfigError, register_app, app, self.worker))

    def test_register_is_called_with_the_worker_from_the_current_directory(self) -> None:
        self.app("shop_one", "calls = []\ndef register(worker): calls.append(worker)\n")
        register_app("shop_one", self.worker)
        self.assertEqual(sys.modules["shop_one"].calls, [self.worker])

    def test_an_app_may_name_another_function(self) -> None:
        self.app("shop_two", "calls = []\ndef follow(worker): calls.append(worker)\n")
        register_app("shop_two:follow", self.worker)
        self.assertEqual(sys.modules["shop_two"].calls, [self.worker])

    def test_a_module_that_is_not_there_is_named(self) -> None:
        self.assertEqual(self.refusal("no.such"), "app: there is no module no.such, neither here nor installed")

    def test_the_name_of_a_file_is_refused_with_the_name_of_its_module(self) -> None:
        self.app("shop_file", "")
        self.assertEqual(
            self.refusal("shop_file.py"),
            "app: there is no module shop_file.py, neither here nor installed; did you mean shop_file?",
        )
        self.assertNotIn("did you mean", self.refusal("no_such_file.py"))

    def test_a_module_that_the_application_needs_is_named(self) -> None:
        self.app("shop_three", "import no_such_library\n")
        self.assertEqual(self.refusal("shop_three"), "app: shop_three needs no_such_library, which is not installed")

    def test_a_function_that_is_not_there_is_named_with_its_file(self) -> None:
        self.app("shop_four", "register = 1\n")
        self.assertRegex(self.refusal("shop_four"), r"^app: shop_four \(.*shop_four\.py\) has no function register$")

    def test_an_asynchronous_function_would_never_run_and_is_refused(self) -> None:
        self.app("shop_five", "async def register(worker): pass\n")
        self.assertIn("must be a plain function", self.refusal("shop_five"))

    def test_an_exception_of_the_application_is_one_line_with_its_place(self) -> None:
        self.app("shop_six", "def register(worker):\n    import json\n    json.loads('\\n')\n")
        self.assertRegex(
            self.refusal("shop_six"), r"^app: shop_six:register failed: JSONDecodeError: .* \(.*shop_six\.py, line 3\)$"
        )

    def test_an_exception_of_this_package_is_one_line_with_the_place_of_the_call(self) -> None:
        self.app("shop_seven", "def register(worker):\n    worker.on('a b')\n")
        self.assertRegex(self.refusal("shop_seven"), r"failed: \w+Error: .*shop_seven\.py, line 2\)$")

    def test_an_exception_at_import_is_one_line_with_its_place(self) -> None:
        self.app("shop_eight", "import os\nassert os is None\n")
        self.assertRegex(
            self.refusal("shop_eight"),
            r"^app: shop_eight cannot be imported: AssertionError \(.*shop_eight\.py, line 2\)$",
        )

    def test_a_syntax_error_is_one_line_with_its_place(self) -> None:
        self.app("shop_nine", "def register(worker):\n    return (\n")
        self.assertRegex(
            self.refusal("shop_nine"), r"^app: .* cannot be imported: SyntaxError in .*shop_nine\.py, line 2: "
        )

    def test_a_function_that_does_not_take_the_worker_is_refused(self) -> None:
        self.app("shop_ten", "def register(): pass\n")
        self.assertIn("shop_ten:register must take one argument, the worker", self.refusal("shop_ten"))

    def test_an_invalid_name_of_a_module_or_function_is_refused(self) -> None:
        for wrong in (":x", "../x", "custom:", "custom.py/x", ":", "a:b:c", "a..b"):
            self.assertIn("is not of the form MODULE or MODULE:NAME", self.refusal(wrong))
