//! The payloads of webhooks. Tests check them against GitHub's description.

use serde_json::{Value, json};

use super::{
    client::RepositoryAccess,
    json::{self as objects, time},
    pulls, statuses,
};
use crate::local::{
    ForgeError, LocalForge, git,
    history::{self, Commit, CommitFilter},
    hooks::MovedReference,
    pull_requests::PullRecord,
    statuses::CommitStatus,
};

// GitHub lists 2048 commits; programs ask for more.
const MAX_COMMITS: usize = 100;
const NONE: &str = "0000000000000000000000000000000000000000";

fn access(forge: &LocalForge, name: &str, login: &str) -> Result<RepositoryAccess, ForgeError> {
    Ok(RepositoryAccess {
        forge: forge.clone(),
        name: name.to_owned(),
        git: forge.repository_path(name)?,
        urls: forge.urls(),
        login: login.to_owned(),
    })
}

/// A repository as webhooks have it, and who did what they tell of.
async fn base(access: &RepositoryAccess) -> Result<Value, ForgeError> {
    let mut repository = objects::repository(access).await?;
    repository["stargazers"] = 0.into();
    repository["master_branch"] = repository["default_branch"].clone();
    let sender = objects::user(&access.urls, &access.login);
    Ok(json!({"repository": repository, "sender": sender}))
}

/// The first delivery to a new hook.
pub(in crate::local) async fn ping(
    forge: &LocalForge,
    name: &str,
    login: &str,
    hook: Value,
) -> Result<Value, ForgeError> {
    let mut payload = base(&access(forge, name, login)?).await?;
    payload["zen"] = "Keep it logically awesome.".into();
    payload["hook_id"] = hook["id"].clone();
    payload["hook"] = hook;
    Ok(payload)
}

pub(in crate::local) async fn pull_request(
    forge: &LocalForge,
    name: &str,
    login: &str,
    (action, record): (&str, &PullRecord),
) -> Result<Value, ForgeError> {
    let access = access(forge, name, login)?;
    let mut payload = base(&access).await?;
    payload["action"] = action.into();
    payload["number"] = record.pull.number.into();
    payload["pull_request"] = pulls::full(&access, record).await?;
    match action {
        "edited" => payload["changes"] = json!({}),
        "synchronize" => {
            // The commit before the push is no longer known.
            payload["before"] = record.pull.commit.clone().into();
            payload["after"] = record.pull.commit.clone().into();
        }
        _ => {}
    }
    Ok(payload)
}

pub(in crate::local) async fn status(
    forge: &LocalForge,
    name: &str,
    sha: &str,
    status: &CommitStatus,
) -> Result<Value, ForgeError> {
    let access = access(forge, name, &status.author)?;
    let mut payload = base(&access).await?;
    let commit = history::commit(&access.git, sha).await?;
    let branches = history::references(&access.git, "refs/heads/").await?;
    let at = branches.iter().filter(|branch| branch.sha == sha);
    let branch = |reference: &history::Reference| {
        let path = format!("/commits/{sha}");
        json!({
            "name": reference.name.trim_start_matches("refs/heads/"),
            "commit": {"sha": sha, "url": access.urls.repository(name, &path)},
            "protected": false,
        })
    };
    let mut commit = objects::commit(&access, &commit);
    commit["commit"]["verification"] = json!({"verified": false, "reason": "unsigned", "signature": null,
            "payload": null, "verified_at": null});
    payload["branches"] = at.map(branch).collect();
    payload["commit"] = commit;
    payload["name"] = format!("{}/{name}", harvest_proto::repository_name::LOCAL_OWNER).into();
    for (field, value) in [
        ("id", status.id.into()),
        ("sha", sha.into()),
        ("context", status.context.clone().into()),
        ("description", status.description.clone().into()),
        ("target_url", status.target_url.clone().into()),
        ("avatar_url", statuses::avatar(&access, &status.author)),
        ("created_at", time(status.created_at).into()),
        ("updated_at", time(status.created_at).into()),
    ] {
        payload[field] = value;
    }
    payload["state"] = serde_json::to_value(status.state).unwrap_or_default();
    Ok(payload)
}

pub(in crate::local) async fn push(
    forge: &LocalForge,
    name: &str,
    login: &str,
    moved: &MovedReference,
) -> Result<Value, ForgeError> {
    let access = access(forge, name, login)?;
    let mut payload = base(&access).await?;
    let commits = pushed_commits(&access, moved).await?;
    let head = match &moved.after {
        Some(after) => head_commit(&access, after).await?,
        None => Value::Null,
    };
    let forced = match (&moved.before, &moved.after) {
        (Some(before), Some(after)) => {
            let arguments = ["merge-base", "--is-ancestor", before, after];
            !git::is_true(&access.git, "compare two commits", &arguments).await.unwrap_or(true)
        }
        _ => false,
    };
    let (before, after) =
        (moved.before.as_deref().unwrap_or(NONE), moved.after.as_deref().unwrap_or(NONE));
    for (field, value) in [
        ("ref", moved.name.clone().into()),
        ("before", before.into()),
        ("after", after.into()),
        ("created", moved.before.is_none().into()),
        ("deleted", moved.after.is_none().into()),
        ("forced", forced.into()),
        ("base_ref", Value::Null),
        ("compare", access.urls.page(name, &format!("/compare/{before}...{after}")).into()),
        ("commits", commits.into()),
        ("head_commit", head),
        ("pusher", json!({"name": login})),
    ] {
        payload[field] = value;
    }
    Ok(payload)
}

/// The new commits, oldest first.
async fn pushed_commits(
    access: &RepositoryAccess,
    moved: &MovedReference,
) -> Result<Vec<Value>, ForgeError> {
    let Some(after) = &moved.after else { return Ok(Vec::new()) };
    let known = match &moved.before {
        Some(before) => Some(before.clone()),
        None => match history::resolve(&access.git, "HEAD").await? {
            Some(head) if head != *after => Some(head),
            _ => None,
        },
    };
    let not_known = known.map(|known| format!("^{known}"));
    let range: Vec<&str> = [after.as_str()].into_iter().chain(not_known.as_deref()).collect();
    let everything = CommitFilter::default();
    let found = history::commits(&access.git, &range, &everything, (0, MAX_COMMITS)).await?;
    let mut commits = Vec::with_capacity(found.len());
    for commit in found.iter().rev() {
        commits.push(commit_json(access, commit).await?);
    }
    Ok(commits)
}

async fn head_commit(access: &RepositoryAccess, sha: &str) -> Result<Value, ForgeError> {
    // An annotated tag is an object of its own.
    match history::resolve(&access.git, sha).await? {
        Some(sha) => commit_json(access, &history::commit(&access.git, &sha).await?).await,
        None => Ok(Value::Null),
    }
}

async fn commit_json(access: &RepositoryAccess, commit: &Commit) -> Result<Value, ForgeError> {
    let from = match commit.parents.first() {
        Some(parent) => parent.clone(),
        None => git::empty_tree(&access.git).await?,
    };
    let changes = history::changes(&access.git, &from, &commit.sha).await?;
    let paths = |wanted: &[&str]| -> Value {
        let all = changes.iter().filter(|change| wanted.contains(&change.status));
        all.map(|change| Value::from(change.path.clone())).collect()
    };
    let signature =
        |one: &history::Signature| json!({"name": one.name, "email": one.email, "date": one.date});
    Ok(json!({
        "id": commit.sha,
        "tree_id": commit.tree,
        "distinct": true,
        "message": commit.message,
        "timestamp": commit.committer.date,
        "url": access.urls.page(&access.name, &format!("/commit/{}", commit.sha)),
        "author": signature(&commit.author),
        "committer": signature(&commit.committer),
        "added": paths(&["added", "copied"]),
        "removed": paths(&["removed"]),
        "modified": paths(&["modified", "renamed", "changed"]),
    }))
}

/// A hook as the API shows it. Its secret is never shown.
pub(super) fn hook(access: &RepositoryAccess, hook: &crate::local::hooks::Hook) -> Value {
    let (urls, name) = (&access.urls, access.name.as_str());
    let url = urls.repository(name, &format!("/hooks/{}", hook.id));
    let mut config = json!({"url": hook.url, "content_type": "json", "insecure_ssl": "0"});
    if hook.secret.is_some() {
        config["secret"] = "********".into();
    }
    json!({
        "type": "Repository",
        "id": hook.id,
        "name": "web",
        "active": hook.active,
        "events": hook.events,
        "config": config,
        "created_at": time(hook.created_at),
        "updated_at": time(hook.created_at),
        "url": url,
        "test_url": format!("{url}/test"),
        "ping_url": format!("{url}/pings"),
        "deliveries_url": format!("{url}/deliveries"),
        "last_response": {"code": null, "status": "unused", "message": null},
    })
}
