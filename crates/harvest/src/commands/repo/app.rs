//! `harvest repo app`: registers an App on the local forge, which answers GitHub's REST API.

use std::path::Path;

use anyhow::{Context, Result, bail};
use harvest_forge::{App, NewApp, PermissionLevel, Permissions};
use harvest_proto::{RepositoryRef, Secret, api::Repository};
use serde_json::json;

use crate::{Invocation, client::Client, printer::Advice, publish::forge};

/// What a program that works like Harvest needs.
const PERMISSIONS: &[(&str, PermissionLevel)] = &[
    ("actions", PermissionLevel::Read),
    ("checks", PermissionLevel::Read),
    ("contents", PermissionLevel::Write),
    ("issues", PermissionLevel::Write),
    ("pull_requests", PermissionLevel::Write),
    ("repository_hooks", PermissionLevel::Write),
    ("statuses", PermissionLevel::Write),
];

pub(super) async fn run(
    ctx: &Invocation,
    client: &Client,
    name: String,
    key: &Path,
    repositories: &[RepositoryRef],
) -> Result<()> {
    let forge = forge(ctx)?;
    let mut names = Vec::new();
    for wanted in repositories {
        let Repository { name, url, .. } = client.repository(wanted).await?;
        let Some(local) = forge.repository_name(&url) else {
            let hint = "`harvest repo add FOLDER` copies a folder to it";
            bail!(Advice::new(format!("{name} is not on the local forge"), hint));
        };
        names.push(local.name().to_owned());
    }
    let pem = std::fs::read_to_string(key);
    let key = Secret::new(pem.with_context(|| format!("cannot read {}", key.display()))?);
    let permissions = Permissions::new(PERMISSIONS.iter().copied())?;
    let repositories = (!names.is_empty()).then_some(names);
    let app = forge.register_app(NewApp { name, key, permissions, repositories }).await;
    let app: App = app.with_context(|| {
        Advice::new("cannot register the App", "`openssl genrsa -out app.pem 2048` makes a key")
    })?;
    let api = format!("{}/forge/api/v3", client.url());
    let shown = json!({"id": app.id, "slug": app.slug(), "api": api});
    ctx.print.result(&shown, |_| format!("{}\n", app.id))?;
    ctx.print.note(format!("Registered App {} ({}); its API is {api}", app.id, app.slug()));
    Ok(())
}
