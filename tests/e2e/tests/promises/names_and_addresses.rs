//! Which names sandboxes may reach, and how a user learns it.

use harvest_e2e::Host;
use harvest_proto::api::{NameSource, NetworkRules};

#[tokio::test]
async fn effective_names_are_listed_with_their_source() {
    let host = Host::start_with(&[("HARVEST_TRUSTED", "*.corp.example")]).await;
    let rules: NetworkRules =
        serde_json::from_str(&host.harvest(["net", "ls", "--json"]).stdout).unwrap();
    let source = |name: &str| {
        rules.names.iter().find(|allowed| allowed.name == name).map(|allowed| allowed.source)
    };
    assert_eq!(source("files.pythonhosted.org"), Some(NameSource::BuiltIn));
    assert_eq!(source("*.corp.example"), Some(NameSource::Config));
    let listed = host.harvest(["net", "ls"]).stdout;
    assert!(listed.contains("built in (pip)") && listed.contains("config"), "{listed}");
}

#[tokio::test]
async fn build_shows_refused_names_and_how_to_allow_them() {
    let host = Host::start().await;
    let setup = "#!/bin/sh\ngetent hosts forbidden.example.org || true\n";
    host.repository("calc", &[("a", "a"), (".harvest/setup.sh", setup)]).await;
    let built = host.harvest(["repo", "build", "calc"]);
    assert_eq!(built.code, 0, "{built:?}");
    for words in [
        "Refused a connection to forbidden.example.org",
        "add \"forbidden.example.org\" to the key `trusted`",
    ] {
        assert!(built.stderr.contains(words), "{words}: {built:?}");
    }
}
