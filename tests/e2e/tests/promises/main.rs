//! The promises of the design, each tested on the real binaries.
#![expect(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod agents;
mod clocks;
mod crowd;
mod database;
mod durable;
mod exec;
mod faults_host;
mod faults_inside;
mod greedy;
mod history;
mod inputs;
mod inside;
mod line;
mod machines;
mod quickstart;
mod raw;
mod reach;
mod readers;
mod readme;
mod recover;
mod rests;
mod sandboxes;
mod secrets;
mod service;
mod stop;
mod storm;
mod tidy;
mod upgrade;

use harvest_proto::{EventBody, event::TurnOutcome};

/// A repository whose one test fails until `add` adds. `-B`: a cached module is told from its source by
/// size and second, and the fix changes neither when it is quick.
const SAMPLE: &[(&str, &str)] = &[
    ("calc.py", "def add(a, b):\n    return a - b\n"),
    (
        "test_calc.py",
        "import unittest\nfrom calc import add\n\nclass Add(unittest.TestCase):\n    def test_adds(self):\n        self.assertEqual(add(2, 3), 5)\n",
    ),
    (".harvest/check.sh", "#!/bin/sh\nexec python3 -B -m unittest -q\n"),
];

fn turn_ended(body: &EventBody) -> bool {
    matches!(body, EventBody::TurnEnded { .. })
}

fn completed(body: &EventBody) -> bool {
    matches!(body, EventBody::TurnEnded { outcome: TurnOutcome::Completed, .. })
}
