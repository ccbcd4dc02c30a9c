//! Webhooks that the forge sends, in GitHub's form: one record each, signed deliveries, and a
//! comparison of references before and after they may have moved. A delivery is repeated twice when
//! the receiver does not answer; one that a killed server had not sent is lost.

use std::{fs, path::Path, sync::OnceLock, time::Duration};

use harvest_proto::{Secret, SessionId, Timestamp};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{
    ForgeError, LocalForge, history,
    pull_requests::PullRecord,
    rest::payloads,
    statuses::CommitStatus,
    storage::{file_error, read_json, write_json},
};
use crate::sign_webhook;

/// The events that hooks may ask for.
pub(super) const EVENTS: &[&str] = &["ping", "pull_request", "push", "status"];

// As on GitHub.
const TIMEOUT: Duration = Duration::from_secs(10);
const RETRIES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(10)];
// A receiver that does not answer must not hold many connections.
static DELIVERIES: Semaphore = Semaphore::const_new(8);

/// A webhook of a repository. The secret signs deliveries, so it is stored as it is, in the forge's
/// private folder.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Hook {
    pub(super) id: u64,
    pub(super) url: String,
    pub(super) secret: Option<String>,
    /// `*` is every event.
    pub(super) events: Vec<String>,
    pub(super) active: bool,
    pub(super) created_at: Timestamp,
}

impl Hook {
    fn takes(&self, event: &str) -> bool {
        let named = |one: &String| one == event || one == "*";
        self.active && (event == "ping" || self.events.iter().any(named))
    }
}

/// The references of a repository before they may move. Tells hooks what has moved when dropped.
pub(super) struct RefWatch {
    forge: LocalForge,
    name: String,
    login: String,
    before: Vec<history::Reference>,
}

impl Drop for RefWatch {
    fn drop(&mut self) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (forge, name) = (self.forge.clone(), std::mem::take(&mut self.name));
        let (login, before) = (std::mem::take(&mut self.login), std::mem::take(&mut self.before));
        runtime.spawn(async move {
            if let Err(error) = forge.tell_moved(&name, &login, &before).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(name, error, "cannot tell hooks of a push");
            }
        });
    }
}

impl LocalForge {
    pub(super) async fn add_hook(
        &self,
        name: &str,
        url: String,
        secret: Option<String>,
        (events, active): (Vec<String>, bool),
    ) -> Result<Hook, ForgeError> {
        let folder = self.existing_folder(name)?;
        let _guard = self.shared.writing.lock().await;
        let (id, created_at) = (self.next_id()?, self.shared.clock.now());
        let hook = Hook { id, url, secret, events, active, created_at };
        write_json(&path(&folder, id), &hook)?;
        Ok(hook)
    }

    pub(super) fn hook(&self, name: &str, id: u64) -> Result<Option<Hook>, ForgeError> {
        read_json(&path(&self.existing_folder(name)?, id))
    }

    /// All hooks of a repository, oldest first.
    pub(super) fn hooks(&self, name: &str) -> Result<Vec<Hook>, ForgeError> {
        let folder = self.existing_folder(name)?.join("hooks");
        let Ok(entries) = fs::read_dir(&folder) else { return Ok(Vec::new()) };
        let mut all = Vec::new();
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            if path.extension().is_some_and(|extension| extension == "json") {
                all.extend(read_json::<Hook>(&path)?);
            }
        }
        all.sort_unstable_by_key(|hook| hook.id);
        Ok(all)
    }

    /// Returns whether there was such a hook.
    pub(super) async fn remove_hook(&self, name: &str, id: u64) -> Result<bool, ForgeError> {
        let path = path(&self.existing_folder(name)?, id);
        let _guard = self.shared.writing.lock().await;
        if read_json::<Hook>(&path)?.is_none() {
            return Ok(false);
        }
        fs::remove_file(&path).map_err(file_error("remove", &path))?;
        Ok(true)
    }

    fn takers(&self, name: &str, event: &str) -> Vec<Hook> {
        let all = self.hooks(name).unwrap_or_else(|error| {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(name, error, "cannot read the hooks of a repository");
            Vec::new()
        });
        all.into_iter().filter(|hook| hook.takes(event)).collect()
    }

    /// Remembers where references are; `None` when no hook wants to know.
    pub(super) async fn watch_references(&self, name: &str, login: &str) -> Option<RefWatch> {
        if self.takers(name, "push").is_empty() && self.takers(name, "pull_request").is_empty() {
            return None;
        }
        let git = self.repository_path(name).ok()?;
        let before = history::references(&git, "refs/").await.ok()?;
        let (name, login) = (name.to_owned(), login.to_owned());
        Some(RefWatch { forge: self.clone(), name, login, before })
    }

    async fn tell_moved(
        &self,
        name: &str,
        login: &str,
        before: &[history::Reference],
    ) -> Result<(), ForgeError> {
        let git = self.repository_path(name)?;
        let after = history::references(&git, "refs/").await?;
        for moved in moves(before, &after) {
            let payload = payloads::push(self, name, login, &moved).await?;
            self.deliver(name, "push", &payload);
            let Some(branch) = moved.name.strip_prefix("refs/heads/") else { continue };
            for record in self.pull_records(name).await? {
                let is_open = record.pull.state == harvest_proto::api::PullRequestState::Open;
                if is_open && *record.pull.branch == *branch && moved.after.is_some() {
                    self.tell_pull(name, "synchronize", &record, login).await?;
                }
            }
        }
        Ok(())
    }

    /// Tells hooks in the background that a pull request changed.
    pub(super) fn tell_pull_soon(
        &self,
        name: &str,
        action: &'static str,
        record: &PullRecord,
        login: &str,
    ) {
        if self.takers(name, "pull_request").is_empty() {
            return;
        }
        let (forge, name) = (self.clone(), name.to_owned());
        let (record, login) = (record.clone(), login.to_owned());
        tokio::spawn(async move {
            if let Err(error) = forge.tell_pull(&name, action, &record, &login).await {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(name, error, "cannot tell hooks of a pull request");
            }
        });
    }

    async fn tell_pull(
        &self,
        name: &str,
        action: &'static str,
        record: &PullRecord,
        login: &str,
    ) -> Result<(), ForgeError> {
        let payload = payloads::pull_request(self, name, login, (action, record)).await?;
        self.deliver(name, "pull_request", &payload);
        Ok(())
    }

    /// Tells hooks in the background of a new status of a commit.
    pub(super) fn tell_status_soon(&self, name: &str, sha: &str, status: &CommitStatus) {
        if self.takers(name, "status").is_empty() {
            return;
        }
        let (forge, name) = (self.clone(), name.to_owned());
        let (sha, status) = (sha.to_owned(), status.clone());
        tokio::spawn(async move {
            match payloads::status(&forge, &name, &sha, &status).await {
                Ok(payload) => forge.deliver(&name, "status", &payload),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(name, error, "cannot tell hooks of a status");
                }
            }
        });
    }

    /// Sends an event to the hooks that want it, in the background.
    fn deliver(&self, name: &str, event: &'static str, payload: &Value) {
        for hook in self.takers(name, event) {
            send_soon(hook, event, payload);
        }
    }
}

/// A reference that has moved.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MovedReference {
    pub(super) name: String,
    pub(super) before: Option<String>,
    pub(super) after: Option<String>,
}

/// What has moved: branches and tags.
fn moves(before: &[history::Reference], after: &[history::Reference]) -> Vec<MovedReference> {
    let sha = |all: &[history::Reference], name: &str| {
        all.iter().find(|one| one.name == name).map(|one| one.sha.clone())
    };
    let mut names: Vec<&str> = before.iter().chain(after).map(|one| one.name.as_str()).collect();
    names.retain(|name| name.starts_with("refs/heads/") || name.starts_with("refs/tags/"));
    names.sort_unstable();
    names.dedup();
    let moved = |name: &str| {
        let (before, after) = (sha(before, name), sha(after, name));
        (before != after).then(|| MovedReference { name: name.to_owned(), before, after })
    };
    names.into_iter().filter_map(moved).collect()
}

/// Sends a payload to one hook in the background.
pub(super) fn send_soon(hook: Hook, event: &'static str, payload: &Value) {
    let body = payload.to_string();
    tokio::spawn(async move {
        let delivery = SessionId::random().part().to_owned();
        let mut retries = RETRIES.into_iter();
        while !send(&hook, event, &delivery, &body).await {
            match retries.next() {
                Some(wait) => tokio::time::sleep(wait).await,
                None => return tracing::warn!(hook = hook.id, event, "a webhook is not taken"),
            }
        }
    });
}

async fn send(hook: &Hook, event: &str, delivery: &str, body: &str) -> bool {
    static CLIENT: OnceLock<Option<reqwest::Client>> = OnceLock::new();
    let client = CLIENT.get_or_init(|| {
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(TIMEOUT)
            // Deliveries are rare, and a kept connection belongs to one runtime.
            .pool_max_idle_per_host(0)
            .no_proxy();
        client.build().ok()
    });
    // The semaphore is never closed.
    let (Some(client), Ok(_permit)) = (client, DELIVERIES.acquire().await) else { return false };
    let mut request = client
        .post(&hook.url)
        .header("content-type", "application/json")
        .header("user-agent", "GitHub-Hookshot/harvest")
        .header("x-github-event", event)
        .header("x-github-delivery", delivery)
        .header("x-github-hook-id", hook.id.to_string());
    if let Some(secret) = &hook.secret {
        let signature = sign_webhook(&Secret::new(secret.clone()), body.as_bytes());
        request = request.header("x-hub-signature-256", signature);
    }
    let answered = request.body(body.to_owned()).send().await;
    answered.is_ok_and(|answer| answer.status().is_success())
}

fn path(folder: &Path, id: u64) -> std::path::PathBuf {
    folder.join("hooks").join(format!("{id}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn created_moved_and_deleted_references_are_found() {
        let one = |name: &str, sha: &str| history::Reference {
            name: name.to_owned(),
            sha: sha.to_owned(),
            kind: "commit".to_owned(),
        };
        let before = [one("refs/heads/a", "1"), one("refs/heads/b", "1"), one("refs/tags/t", "1")];
        let after = [
            one("refs/heads/a", "2"),
            one("refs/heads/c", "1"),
            one("refs/tags/t", "1"),
            one("refs/harvest/kept/1", "1"),
        ];
        let moved: Vec<_> = moves(&before, &after)
            .into_iter()
            .map(|one| (one.name, one.before, one.after))
            .collect();
        let sha = |text: &str| Some(text.to_owned());
        assert_eq!(
            moved,
            [
                ("refs/heads/a".to_owned(), sha("1"), sha("2")),
                ("refs/heads/b".to_owned(), sha("1"), None),
                ("refs/heads/c".to_owned(), None, sha("1")),
            ]
        );
    }
}
