//! `harvest secret`: stores, lists and removes secrets. Values are never shown again.

use std::{
    collections::BTreeMap,
    io::{BufRead, IsTerminal},
};

use anyhow::{Context, Result, bail};
use harvest_gateway::vault::SecretName;
use harvest_proto::{
    Secret,
    api::{SecretUse, StoredSecret},
};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    Invocation,
    cli::{SecretCommand, SecretOwnerArgs},
    client::{Client, path_segment},
    config::process_env,
    known_secrets::correction,
    printer::Advice,
    table,
};

pub(crate) async fn run(ctx: &Invocation, verb: &SecretCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        SecretCommand::Set { name, owner, hosts, header } => {
            let (folder, of) = owned_by(ctx, &client, owner).await?;
            let value = read_value(ctx, name).await?;
            let mut body = json!({ "value": value.expose() });
            if !hosts.is_empty() {
                body["hosts"] = json!(hosts);
                body["header"] = json!(header);
            }
            client
                .secret_set(&format!("{folder}/{}", path_segment(name)?), &body)
                .await
                .with_context(|| format!("cannot store {name}"))?;
            ctx.print.document(&json!({ "stored": name }))?;
            ctx.print.note(format!("Stored {name} {of}"));
            note_hosts(ctx, hosts, owner.user);
            // For a host any name will do.
            if let Some(correction) = correction(name).filter(|_| hosts.is_empty()) {
                ctx.print.warn(correction);
            }
        }
        SecretCommand::Ls => list(ctx, &client.all("/v1/secrets").await?)?,
        SecretCommand::Rm { name, owner } => {
            let (folder, of) = owned_by(ctx, &client, owner).await?;
            client.delete(&format!("{folder}/{}", path_segment(name)?)).await?;
            ctx.print.document(&json!({ "removed": name }))?;
            ctx.print.note(format!("Removed {name} {of}"));
        }
        SecretCommand::Uses { name } => {
            uses(ctx, &client.all(&format!("/v1/secrets/{}/uses", path_segment(name)?)).await?)?;
        }
    }
    Ok(0)
}

/// The path of an owner's secrets, and the owner in words.
async fn owned_by(
    ctx: &Invocation,
    client: &Client,
    owner: &SecretOwnerArgs,
) -> Result<(String, String)> {
    Ok(match owner {
        SecretOwnerArgs { repository: Some(name), .. } => {
            let name = client.repository(name).await?.name;
            (format!("/v1/repositories/{name}/secrets"), format!("for {name}"))
        }
        SecretOwnerArgs { session: Some(typed), .. } => {
            let session = ctx.session(typed).await?.1;
            (format!("/v1/sessions/{session}/secrets"), format!("for {session}"))
        }
        SecretOwnerArgs { user: true, .. } => {
            ("/v1/me/secrets".to_owned(), "for your sessions".to_owned())
        }
        _ => ("/v1/secrets".to_owned(), "for all sessions and builds".to_owned()),
    })
}

fn note_hosts(ctx: &Invocation, hosts: &[String], user: bool) {
    if hosts.is_empty() {
        return;
    }
    let hosts = hosts.join(" ");
    ctx.print.note(match user {
        true => format!(
            "Sessions that may connect to {hosts} use it; `harvest net allow SESSION {hosts}` \
             allows that"
        ),
        false => format!("Its sessions may connect to {hosts} (`harvest net ls` lists the rules)"),
    });
}

fn list(ctx: &Invocation, secrets: &Vec<StoredSecret>) -> Result<()> {
    let row = |one: &StoredSecret| {
        let hosts = if one.hosts.is_empty() { "-".to_owned() } else { one.hosts.join(", ") };
        let owner = one.owner.clone().unwrap_or_else(|| "-".to_owned());
        [one.name.clone(), one.scope.to_string(), owner, hosts]
    };
    ctx.print.result(secrets, |secrets| match secrets.is_empty() {
        true => String::new(),
        false => table::plain(["NAME", "SCOPE", "OF", "HOSTS"], secrets.iter().map(row)),
    })?;
    if secrets.is_empty() {
        ctx.print.note("No secrets; `harvest secret set NAME` stores one");
    }
    Ok(())
}

fn uses(ctx: &Invocation, uses: &Vec<SecretUse>) -> Result<()> {
    let row = |one: &SecretUse| {
        let session = one.session.as_ref().map_or_else(|| "build".to_owned(), ToString::to_string);
        let turn = if one.turn == 0 { "-".to_owned() } else { one.turn.to_string() };
        let request = format!("{} https://{}{}", one.method, one.host, one.path);
        [one.at.to_string(), session, turn, one.scope.to_string(), request]
    };
    const HEADER: [&str; 5] = ["TIME", "SESSION", "TURN", "SCOPE", "REQUEST"];
    ctx.print.result(uses, |uses| match uses.is_empty() {
        true => String::new(),
        false => table::plain(HEADER, uses.iter().map(row)),
    })?;
    if uses.is_empty() {
        ctx.print.note("No request used it as the secret of a host");
    }
    Ok(())
}

/// The secrets of a new session: `NAME=VALUE`, or `NAME` for the value in this environment, in
/// standard input if nothing else reads that, or typed.
pub(crate) async fn given(
    ctx: &Invocation,
    args: &[String],
    may_read_stdin: bool,
) -> Result<BTreeMap<String, Secret<String>>> {
    let mut secrets = BTreeMap::new();
    let mut read = false;
    for arg in args {
        let (name, value) = match arg.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (arg.as_str(), process_env(arg)),
        };
        check_name(name)?;
        let terminal = std::io::stdin().is_terminal();
        let value = match value {
            Some(value) => Secret::new(value),
            None if terminal || (may_read_stdin && !read) => {
                read = true;
                read_value(ctx, name).await?
            }
            None => bail!(Advice::new(
                format!("there is no value for the secret {name}"),
                format!("set it in the environment: `{name}=\"$(cat FILE)\" harvest run …`")
            )),
        };
        secrets.insert(name.to_owned(), value);
    }
    Ok(secrets)
}

fn check_name(name: &str) -> Result<()> {
    name.parse::<SecretName>().map(drop).map_err(|error| {
        Advice::new(
            format!("`{name}` is not a valid name for a secret"),
            format!("{error}, such as ANTHROPIC_API_KEY"),
        )
        .into()
    })
}

/// Reads the value from a pipe, or one typed line without echo. Not from an argument: those are
/// visible in `ps`.
async fn read_value(ctx: &Invocation, name: &str) -> Result<Secret<String>> {
    // Checked before the user types the value.
    check_name(name)?;
    let value = match std::io::stdin().is_terminal() {
        true => read_typed(ctx, name).await?,
        false => std::io::read_to_string(std::io::stdin()).context("cannot read the value")?,
    };
    let value = value.trim_end_matches(['\n', '\r']);
    if value.is_empty() {
        bail!(Advice::new(
            "the value is empty",
            format!("pipe it in: `harvest secret set {name} < FILE`")
        ));
    }
    Ok(Secret::new(value.to_owned()))
}

/// Restores the terminal's echo in every case, also on Ctrl-C.
async fn read_typed(ctx: &Invocation, name: &str) -> Result<String> {
    let stdin = std::io::stdin();
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let before = tcgetattr(&stdin).context("cannot turn off the terminal's echo")?;
    let mut silent = before.clone();
    silent.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&stdin, OptionalActions::Flush, &silent)
        .context("cannot turn off the terminal's echo")?;
    ctx.print.prompt(&format!("{name} (not shown): "));
    let typed = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map(|_| line)
    });
    let typed = tokio::select! {
        typed = typed => Some(typed),
        _ = interrupted.recv() => None,
        _ = terminated.recv() => None,
    };
    tcsetattr(&stdin, OptionalActions::Flush, &before)
        .context("cannot turn the terminal's echo on again; run `stty echo`")?;
    ctx.print.prompt("\n");
    match typed {
        Some(typed) => typed?.context("cannot read the value"),
        None => bail!("interrupted; nothing was stored"),
    }
}
