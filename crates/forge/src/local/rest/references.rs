//! Routes of branches and references. A reference that is moved back or deleted leaves its old
//! commit below `refs/harvest/kept/`, because evidence and pull requests refer to it.

use axum::{
    Json,
    body::Bytes,
    extract::Path,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::BranchName;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess, body, list},
    error::RestError,
    json::{self as objects, encode, node_id},
};
use crate::local::{
    git,
    history::{self, Reference, is_object_id},
    kept::KEPT,
    permissions::PermissionLevel::{Read, Write},
};

const CONTENTS: &[&str] = &["contents"];
const NO_OBJECT: &str = "Object does not exist";
const NO_REFERENCE: &str = "Reference does not exist";

pub(super) async fn branches(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let all = history::references(&access.git, "refs/heads/").await?;
    let (page, links) = client.paginate(all);
    let branch = |reference: Reference| {
        let name = reference.name.trim_start_matches("refs/heads/");
        let path = format!("/commits/{}", reference.sha);
        json!({
            "name": name,
            "commit": {"sha": reference.sha, "url": access.urls.repository(&access.name, &path)},
            "protected": false,
        })
    };
    Ok(list(page.into_iter().map(branch).collect(), links))
}

pub(super) async fn branch(
    client: Client,
    Path((owner, name, branch)): Path<(String, String, String)>,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let missing = || RestError::new(StatusCode::NOT_FOUND, "Branch not found");
    let branch: BranchName = branch.parse().map_err(|_| missing())?;
    let head = git::head(&access.git, &branch).await?.ok_or_else(missing)?;
    let commit = history::commit(&access.git, &head).await?;
    let path = format!("/branches/{}", encode(&branch));
    let url = access.urls.repository(&access.name, &path);
    let html = access.urls.page(&access.name, &format!("/tree/{}", encode(&branch)));
    Ok(Json(json!({
        "name": *branch,
        "commit": objects::commit(&access, &commit),
        "_links": {"self": url, "html": html},
        "protected": false,
        "protection": {
            "enabled": false,
            "required_status_checks": {"enforcement_level": "off", "contexts": [], "checks": []},
        },
        "protection_url": format!("{url}/protection"),
    })))
}

fn reference_json(access: &RepositoryAccess, reference: &Reference) -> Value {
    let path = format!("/git/{}", encode(&reference.name));
    let object = format!("/git/{}s/{}", reference.kind, reference.sha);
    json!({
        "ref": reference.name,
        "node_id": node_id("Ref", &reference.name),
        "url": access.urls.repository(&access.name, &path),
        "object": {
            "type": reference.kind,
            "sha": reference.sha,
            "url": access.urls.repository(&access.name, &object),
        },
    })
}

pub(super) async fn get(
    client: Client,
    Path((owner, name, reference)): Path<(String, String, String)>,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let found = find(&access, &format!("refs/{reference}")).await?;
    Ok(Json(reference_json(&access, &found.ok_or_else(RestError::not_found)?)))
}

async fn find(access: &RepositoryAccess, name: &str) -> Result<Option<Reference>, RestError> {
    let all = history::references(&access.git, name).await?;
    Ok(all.into_iter().find(|reference| reference.name == name))
}

pub(super) async fn matching(
    client: Client,
    Path((owner, name, prefix)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Read)?;
    let all = history::references(&access.git, &format!("refs/{prefix}")).await?;
    let all: Vec<Value> = all.iter().map(|found| reference_json(&access, found)).collect();
    let (page, links) = client.paginate(all);
    Ok(list(page, links))
}

#[derive(Deserialize)]
struct NewReference {
    r#ref: Option<String>,
    sha: Option<String>,
}

pub(super) async fn create(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
    bytes: Bytes,
) -> Result<Response, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Write)?;
    let _watch = access.forge.watch_references(&access.name, &access.login).await;
    let new: NewReference = body(&bytes)?;
    let name = new.r#ref.unwrap_or_default();
    if !is_writable(&name) {
        return Err(RestError::field("Reference", "ref", "invalid"));
    }
    let sha = existing_commit(&access, new.sha).await?;
    let script = format!("create {name} {sha}\n");
    if update_refs(&access, &script).await.is_err() {
        return Err(RestError::unprocessable("Reference already exists"));
    }
    let created = find(&access, &name).await?.ok_or_else(RestError::not_found)?;
    Ok((StatusCode::CREATED, Json(reference_json(&access, &created))).into_response())
}

#[derive(Deserialize)]
struct ReferenceUpdate {
    sha: Option<String>,
    #[serde(default)]
    force: bool,
}

pub(super) async fn update(
    client: Client,
    Path((owner, name, reference)): Path<(String, String, String)>,
    bytes: Bytes,
) -> Result<Json<Value>, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Write)?;
    let _watch = access.forge.watch_references(&access.name, &access.login).await;
    let update: ReferenceUpdate = body(&bytes)?;
    let name = format!("refs/{reference}");
    let old = find_writable(&access, &name).await?.sha;
    let sha = existing_commit(&access, update.sha).await?;
    let arguments = ["merge-base", "--is-ancestor", &old, &sha];
    let forward = git::is_true(&access.git, "compare two commits", &arguments).await?;
    if !forward && !update.force {
        return Err(RestError::unprocessable("Update is not a fast forward"));
    }
    let keep = if forward { String::new() } else { keep(&old) };
    if update_refs(&access, &format!("{keep}update {name} {sha} {old}\n")).await.is_err() {
        return Err(RestError::conflict("Reference was updated by another request"));
    }
    let updated = find(&access, &name).await?.ok_or_else(RestError::not_found)?;
    Ok(Json(reference_json(&access, &updated)))
}

pub(super) async fn delete(
    client: Client,
    Path((owner, name, reference)): Path<(String, String, String)>,
) -> Result<StatusCode, RestError> {
    let access = client.open((&owner, &name), CONTENTS, Write)?;
    let _watch = access.forge.watch_references(&access.name, &access.login).await;
    let name = format!("refs/{reference}");
    let old = find_writable(&access, &name).await?.sha;
    if update_refs(&access, &format!("{}delete {name} {old}\n", keep(&old))).await.is_err() {
        return Err(RestError::conflict("Reference was updated by another request"));
    }
    Ok(StatusCode::NO_CONTENT)
}

fn keep(sha: &str) -> String {
    format!("update {KEPT}/{sha} {sha}\n")
}

/// Branches and tags with plain names.
fn is_writable(name: &str) -> bool {
    let short = name.strip_prefix("refs/heads/").or(name.strip_prefix("refs/tags/"));
    short.is_some_and(|short| short.parse::<BranchName>().is_ok())
}

async fn find_writable(access: &RepositoryAccess, name: &str) -> Result<Reference, RestError> {
    let found = if is_writable(name) { find(access, name).await? } else { None };
    found.ok_or_else(|| RestError::unprocessable(NO_REFERENCE))
}

async fn existing_commit(
    access: &RepositoryAccess,
    sha: Option<String>,
) -> Result<String, RestError> {
    let sha = sha.filter(|sha| is_object_id(sha));
    let found = match &sha {
        Some(sha) => history::resolve(&access.git, sha).await?,
        None => None,
    };
    found.ok_or_else(|| RestError::unprocessable(NO_OBJECT))
}

/// Changes references, all or none.
async fn update_refs(
    access: &RepositoryAccess,
    script: &str,
) -> Result<(), crate::local::ForgeError> {
    let arguments = ["update-ref", "--stdin"];
    git::with_input(&access.git, "update references", &arguments, &[], script).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_branches_and_tags_are_writable() {
        assert!(is_writable("refs/heads/a/b") && is_writable("refs/tags/v1.0"));
        for other in ["HEAD", "refs/heads/", "refs/harvest/kept/x", "refs/heads/a b\ndelete x"] {
            assert!(!is_writable(other), "{other}");
        }
    }
}
