//! The promises of the design, each tested on the real binaries.
#![expect(clippy::unwrap_used, reason = "a test that meets an error has failed")]

mod agent_contract;
mod agent_descriptors;
mod agent_images;
mod agent_shells;
mod agents;
mod app_folder;
mod artifacts;
mod background_server;
mod backup;
mod boot_retries;
mod build_faults;
mod build_hostile;
mod clocks;
mod command_line;
mod configured_agents;
mod database;
mod dependencies;
mod documents;
mod durable;
mod exec;
mod faults_host;
mod faults_inside;
mod followers;
mod freeze_pause_restore;
mod full_image;
mod gc_all;
mod gh_inside;
mod github;
mod history;
mod history_budget;
mod host_network;
mod host_secrets;
mod identity;
mod image_refresh;
mod inputs;
mod inside;
mod keys_and_budget;
mod laptop;
mod live_terminal;
mod many_sessions;
mod mcp_servers;
mod memory_inside;
mod models;
mod names_and_addresses;
mod network;
mod network_rules;
mod opencode;
mod opencode_server;
mod own_branch;
mod packages;
mod plain_remote;
mod prompt_options;
mod prompt_to_pull_request;
mod pull;
mod quickstart;
mod recovery;
mod repositories;
mod repository_config;
mod resource_limits;
mod sandbox_network;
mod sandboxes;
mod secrets;
mod session_output;
mod show_agent;
mod shutdown;
mod slow_readers;
mod slow_remote;
mod standalone_sandboxes;
mod stop;
mod storm;
mod syncs;
mod terminals_and_files;
mod tidy;
mod tools;
mod turn_zero;
mod typed_agents;
mod upgrade;
mod verify;
mod warm_pool;
mod with_and_without_server;

use harvest_proto::{EventBody, event::TurnOutcome};

/// A repository whose only test fails until `add` is fixed. `-B`: Python's cache compares size and
/// mtime in seconds, and a quick fix changes neither.
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
