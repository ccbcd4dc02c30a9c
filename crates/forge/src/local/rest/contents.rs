//! Routes of files and folders at a commit.

use axum::{
    Json,
    extract::Path,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

use super::{
    client::{Client, RepositoryAccess},
    error::RestError,
    json::encode,
};
use crate::{
    local::{
        git,
        history::{self, TreeEntry},
        permissions::PermissionLevel::Read,
    },
    read_route::MAX_READ_BYTES,
};

// GitHub's limits: larger files have no content, or only a raw one.
const MAX_INLINE_BYTES: u64 = 1 << 20;
const MAX_RAW_BYTES: u64 = 100 << 20;
// GitHub breaks lines of base64 after this many characters.
const LINE: usize = 60;

pub(super) async fn root(
    client: Client,
    Path((owner, name)): Path<(String, String)>,
) -> Result<Response, RestError> {
    at_path(&client, (&owner, &name), "").await
}

pub(super) async fn get(
    client: Client,
    Path((owner, name, path)): Path<(String, String, String)>,
) -> Result<Response, RestError> {
    at_path(&client, (&owner, &name), path.trim_end_matches('/')).await
}

async fn at_path(
    client: &Client,
    repository: (&str, &str),
    path: &str,
) -> Result<Response, RestError> {
    let access = client.open(repository, &["contents"], Read)?;
    let reference = client.parameter("ref").unwrap_or("HEAD");
    let missing = || {
        RestError::new(StatusCode::NOT_FOUND, format!("No commit found for the ref {reference}"))
    };
    let commit = history::resolve(&access.git, reference).await?.ok_or_else(missing)?;
    if path.is_empty() {
        return folder(&access, &commit, &commit, "").await;
    }
    let is_plain =
        |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    if !path.split('/').all(is_plain) {
        return Err(RestError::not_found());
    }
    let entry = history::entry(&access.git, &commit, path).await?;
    let entry = entry.ok_or_else(RestError::not_found)?;
    match kind(&entry.mode) {
        "dir" => folder(&access, &commit, &entry.sha, &format!("{path}/")).await,
        kind => file(client, &access, &commit, &entry, kind).await,
    }
}

async fn folder(
    access: &RepositoryAccess,
    commit: &str,
    tree: &str,
    prefix: &str,
) -> Result<Response, RestError> {
    let entries = history::tree(&access.git, tree).await?;
    let object = |mut entry: TreeEntry| {
        entry.path.insert_str(0, prefix);
        // As on GitHub, a submodule in a list is called a file.
        let kind = Some(kind(&entry.mode)).filter(|kind| *kind != "submodule").unwrap_or("file");
        describe(access, commit, &entry, kind)
    };
    Ok(Json(entries.into_iter().map(object).collect::<Vec<_>>()).into_response())
}

async fn file(
    client: &Client,
    access: &RepositoryAccess,
    commit: &str,
    entry: &TreeEntry,
    kind: &'static str,
) -> Result<Response, RestError> {
    let mut object = describe(access, commit, entry, kind);
    if kind == "submodule" {
        // Its URL is in `.gitmodules`, which belongs to the repository's authors.
        object["submodule_git_url"] = Value::Null;
        return Ok(Json(object).into_response());
    }
    if entry.size > MAX_RAW_BYTES {
        return Err(RestError::forbidden("This API returns blobs up to 100 MB in size."));
    }
    // Asked before the file is read.
    if client.is_in_process() && client.wants("raw") && entry.size > MAX_READ_BYTES as u64 {
        return Err(RestError::forbidden("A sandbox reads files up to 8 MiB here; use git."));
    }
    let raw = client.wants("raw");
    let wanted = raw || entry.size <= MAX_INLINE_BYTES;
    let bytes = if wanted { read(access, &entry.sha).await? } else { Vec::new() };
    if raw {
        let kind = [(header::CONTENT_TYPE, "application/vnd.github.raw; charset=utf-8")];
        return Ok((kind, bytes).into_response());
    }
    if kind == "symlink" {
        object["target"] = String::from_utf8_lossy(&bytes).into();
        return Ok(Json(object).into_response());
    }
    object["encoding"] = if wanted { "base64" } else { "none" }.into();
    object["content"] = in_lines(&BASE64_STANDARD.encode(bytes)).into();
    Ok(Json(object).into_response())
}

async fn read(access: &RepositoryAccess, blob: &str) -> Result<Vec<u8>, RestError> {
    let limit = usize::try_from(MAX_RAW_BYTES).unwrap_or(usize::MAX);
    let arguments = ["cat-file", "blob", blob];
    Ok(git::limited(&access.git, "read a file", &arguments, limit).await?.0)
}

fn kind(mode: &str) -> &'static str {
    match mode {
        "040000" => "dir",
        "120000" => "symlink",
        "160000" => "submodule",
        _ => "file",
    }
}

fn describe(access: &RepositoryAccess, commit: &str, entry: &TreeEntry, kind: &str) -> Value {
    let (urls, name, path) = (&access.urls, access.name.as_str(), encode(&entry.path));
    let url = urls.repository(name, &format!("/contents/{path}?ref={commit}"));
    let (page, object) = if kind == "dir" { ("tree", "trees") } else { ("blob", "blobs") };
    let html = urls.page(name, &format!("/{page}/{commit}/{path}"));
    let git = urls.repository(name, &format!("/git/{object}/{}", entry.sha));
    let file = entry.path.rsplit('/').next().unwrap_or_default();
    json!({
        "type": kind,
        "name": file,
        "path": entry.path,
        "sha": entry.sha,
        "size": entry.size,
        "url": url,
        "html_url": html,
        "git_url": git,
        "download_url": null,
        "_links": {"self": url, "git": git, "html": html},
    })
}

fn in_lines(text: &str) -> String {
    let mut lines = String::with_capacity(text.len() + text.len() / LINE + 1);
    for (index, character) in text.chars().enumerate() {
        if index > 0 && index % LINE == 0 {
            lines.push('\n');
        }
        lines.push(character);
    }
    if !text.is_empty() {
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_broken_into_lines() {
        assert_eq!(in_lines(""), "");
        assert_eq!(in_lines("ab"), "ab\n");
        let lines = in_lines(&"a".repeat(61));
        assert_eq!(lines, format!("{}\na\n", "a".repeat(60)));
    }
}
