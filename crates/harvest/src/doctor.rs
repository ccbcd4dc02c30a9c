//! Checks this machine: kernel features probed by the engine, and the programs Harvest calls. Each
//! finding has a stable id and a fix. Works without a server and when none can start.

use std::collections::BTreeSet;

use harvest_gateway::McpServer;
use harvest_proto::{
    McpServerName, SecretOwner, UpstreamName,
    api::{Finding, FindingLevel, KeySource, McpService, ModelService, StoredSecret},
};
use harvest_providers::local::{host_findings, program_findings};

use crate::{
    client::Client,
    config::{Config, process_env},
    database, known_secrets,
    printer::hint_of,
    server_process,
};

const KEY: &str = "ANTHROPIC_API_KEY";
const SUBSCRIPTION_TOKEN: &str = "CLAUDE_CODE_OAUTH_TOKEN";

/// All findings, the engine's first.
pub(crate) fn findings(config: &Config) -> Vec<Finding> {
    match server_process::open_engine(config) {
        Ok(engine) => host_findings(&engine),
        Err(error) => {
            let fix = hint_of(&error)
                .unwrap_or_else(|| "fix the error, then run `harvest doctor` again".to_owned());
            let (id, found) = ("engine".to_owned(), format!("{error:#}"));
            let engine_failed = Finding { id, level: FindingLevel::Fail, found, fix: Some(fix) };
            [vec![engine_failed], program_findings()].concat()
        }
    }
}

/// Whether there is a key for the model service: what the running server says, else what the next
/// server would find.
pub(crate) async fn model_key(config: &Config) -> Finding {
    if let Some(service) = served_key(config).await {
        return key_finding(service.secret.as_deref().unwrap_or(KEY), service.key);
    }
    let stored = stored_without_server(config).await;
    let names = [KEY, SUBSCRIPTION_TOKEN];
    let is_stored = |name: &&str| stored.iter().any(|one| one == name);
    if let Some(name) = names.into_iter().find(is_stored) {
        return key_finding(name, KeySource::Stored);
    }
    match names.into_iter().find(|name| process_env(name).is_some()) {
        Some(name) => key_finding(name, KeySource::Environment),
        None => key_finding(KEY, KeySource::Missing),
    }
}

/// Which of the known secrets there are: stored ones, and what the next `harvest up` from here
/// would find in its environment.
pub(crate) async fn secrets(config: &Config) -> Finding {
    let stored = match Client::find(config) {
        Ok(client) => match client.all::<StoredSecret>("/v1/secrets").await {
            Ok(all) => all.into_iter().map(|one| one.name).collect(),
            Err(_) => Vec::new(),
        },
        Err(_) => stored_without_server(config).await,
    };
    let known = known_secrets::names(config);
    let stored = stored.into_iter().filter(|name| known.contains(name)).collect();
    let environment = known_secrets::in_environment(config).into_keys().collect();
    secrets_finding(stored, environment, known_secrets::misnamed())
}

fn secrets_finding(
    stored: BTreeSet<String>,
    environment: Vec<String>,
    misnamed: Option<String>,
) -> Finding {
    let list = |names: Vec<String>| match names.is_empty() {
        true => "none".to_owned(),
        false => names.join(", "),
    };
    let stored = list(stored.into_iter().collect());
    let found = format!("stored: {stored}; in the environment: {}", list(environment));
    let (level, found) = match &misnamed {
        Some(problem) => (FindingLevel::Warn, format!("{found}; {problem}")),
        None => (FindingLevel::Ok, found),
    };
    let fix = misnamed.map(|_| "`harvest secret set ANTHROPIC_API_KEY`".to_owned());
    Finding { id: "secrets".to_owned(), level, found, fix }
}

/// Which MCP servers agents are offered: what the running server says, else what the next server
/// would find.
pub(crate) async fn mcp_servers(config: &Config) -> Finding {
    if let Ok(client) = Client::find(config)
        && let Ok(services) = client.all("/v1/mcp-servers").await
    {
        return server_finding(&services);
    }
    let stored = stored_without_server(config).await;
    let source = |secret: &String| match () {
        () if stored.contains(secret) => KeySource::Stored,
        () if process_env(secret).is_some() => KeySource::Environment,
        () => KeySource::Missing,
    };
    let service = |(name, server): (&McpServerName, &McpServer)| McpService {
        name: name.clone(),
        secret: server.secret.clone(),
        key: server.secret.as_ref().map_or(KeySource::NotNeeded, source),
    };
    server_finding(&config.mcp_servers.iter().map(service).collect::<Vec<_>>())
}

/// A server without a key is no problem: few users need them all.
fn server_finding(services: &[McpService]) -> Finding {
    let (missing, offered): (Vec<_>, Vec<_>) =
        services.iter().partition(|service| service.key == KeySource::Missing);
    let offered: Vec<String> = offered.iter().map(|service| service.name.to_string()).collect();
    let missing: Vec<String> = missing
        .iter()
        .map(|service| format!("{} ({})", service.name, service.secret.as_deref().unwrap_or("-")))
        .collect();
    let offered = if offered.is_empty() { "none".to_owned() } else { offered.join(", ") };
    let without = if missing.is_empty() { String::new() } else { "; without a key: ".to_owned() };
    let found = format!("for agents: {offered}{without}{}", missing.join(", "));
    Finding { id: "mcp_servers".to_owned(), level: FindingLevel::Ok, found, fix: None }
}

async fn served_key(config: &Config) -> Option<ModelService> {
    let services: Vec<ModelService> =
        Client::find(config).ok()?.all("/v1/model-services").await.ok()?;
    services.into_iter().find(|one| one.name == UpstreamName::anthropic())
}

/// The names of the stored secrets. Reads the home's own database only: a configured one may be
/// slow or unreachable.
async fn stored_without_server(config: &Config) -> Vec<String> {
    if config.database.is_some() || !database::has_own(config) {
        return Vec::new();
    }
    let Ok(store) = database::open(config).await else { return Vec::new() };
    let secrets = store.secret_list().await.unwrap_or_default();
    let global = secrets.into_iter().filter(|one| one.owner == SecretOwner::Global);
    let names = global.map(|one| one.name).collect();
    store.close().await;
    names
}

fn key_finding(name: &str, source: KeySource) -> Finding {
    let (level, found, fix) = match source {
        KeySource::Stored => (FindingLevel::Ok, format!("{name} is a stored secret"), None),
        KeySource::Environment => (FindingLevel::Ok, format!("{name} is in the environment"), None),
        KeySource::NotNeeded => (FindingLevel::Ok, "not needed".to_owned(), None),
        KeySource::Missing => (
            FindingLevel::Warn,
            format!("no {name}: sessions with a real model are refused"),
            Some(format!("`harvest up`, then `harvest secret set {name}`")),
        ),
    };
    Finding { id: "model_key".to_owned(), level, found, fix }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_without_a_key_name_their_secrets() {
        let service = |name: &str, key| McpService {
            name: name.parse().unwrap(),
            secret: Some(format!("{}_KEY", name.to_uppercase())),
            key,
        };
        let services = [service("a", KeySource::Stored), service("b", KeySource::Missing)];
        assert_eq!(server_finding(&services).found, "for agents: a; without a key: b (B_KEY)");
        assert_eq!(server_finding(&services[..1]).found, "for agents: a");
        assert!(server_finding(&services[1..]).found.starts_with("for agents: none; without"));
    }

    #[test]
    fn misnamed_key_is_a_warning() {
        let finding = |stored: &[&str], environment: &[&str], problem: Option<&str>| {
            let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let stored = stored.iter().map(|name| (*name).to_owned()).collect();
            secrets_finding(stored, owned(environment), problem.map(str::to_owned))
        };
        let fine = finding(&["A", "B"], &[], None);
        assert_eq!(fine.found, "stored: A, B; in the environment: none");
        let wrong = finding(&[], &["C"], Some("X is not used; Y is meant"));
        assert!(
            wrong.level == FindingLevel::Warn
                && wrong.found.ends_with("C; X is not used; Y is meant")
        );
    }

    #[test]
    fn missing_key_is_a_warning_with_its_command() {
        let finding = key_finding(KEY, KeySource::Missing);
        assert_eq!(finding.level, FindingLevel::Warn);
        assert!(finding.fix.unwrap().contains("harvest secret set ANTHROPIC_API_KEY"));
        for (source, words) in
            [(KeySource::Stored, "stored secret"), (KeySource::Environment, "environment")]
        {
            let finding = key_finding(KEY, source);
            assert!(finding.level == FindingLevel::Ok && finding.found.contains(words));
        }
    }
}
