//! What sandboxes there are and what is known of each.

use std::time::SystemTime;

use anyhow::Result;
use harvest_proto::{
    Timestamp,
    api::machines::{Sandbox, SandboxList, SandboxNetwork, SandboxStatus, VolumeMount},
};
use serde_json::Value;

use super::super::ls::age;
use crate::{Invocation, desk::Desk, printer::table, resolve};

pub(super) async fn ls(here: &Invocation, desk: &Desk) -> Result<()> {
    let SandboxList { items, torn } = desk.get("/v1/sandboxes").await?;
    for torn in &torn {
        here.print.note(format!("{}: {}", torn.id, torn.error));
        here.print.hint(format!(
            "`harvest sandbox rm --force {}` throws away what is left of it",
            torn.id
        ));
    }
    if items.is_empty() && torn.is_empty() && !here.print.json {
        here.print.note("no sandboxes yet");
        here.print.hint(
            "`harvest sandbox create` starts one that stays; `harvest exec -- COMMAND` needs none",
        );
        return Ok(());
    }
    let now = Timestamp::from(SystemTime::now());
    here.print.result(&items, |items| {
        let rows: Vec<_> = items.iter().map(|sandbox| row(sandbox, now)).collect();
        table(&["ID", "STATE", "IMAGE", "OWNER", "NETWORK", "AGE"], &rows)
    })
}

pub(super) async fn inspect(here: &Invocation, desk: &Desk, typed: &str) -> Result<()> {
    let id = resolve::sandbox(desk, typed).await?;
    let sandbox: Sandbox = desk.get(&format!("/v1/sandboxes/{id}")).await?;
    let mut shown = serde_json::to_value(&sandbox)?;
    shown["volumes"] = sandbox.volumes.iter().map(volume).collect();
    here.print.result(&sandbox, |_| lines(&shown, ""))
}

/// As it is written on a command line.
fn volume(mount: &VolumeMount) -> String {
    let mode = if mount.read_only { ":ro" } else { "" };
    format!("{}:{}{mode}", mount.name, mount.inside)
}

fn row(sandbox: &Sandbox, now: Timestamp) -> Vec<String> {
    let state = match sandbox.state {
        SandboxStatus::Running => "running",
        SandboxStatus::Dead => "dead",
    };
    let network = match sandbox.network {
        SandboxNetwork::None => "none",
        SandboxNetwork::Gateway => "gateway",
        SandboxNetwork::Host => "host",
    };
    vec![
        sandbox.id.to_string(),
        state.to_owned(),
        sandbox.image.clone().unwrap_or_else(|| "–".to_owned()),
        sandbox.owner.clone(),
        network.to_owned(),
        age(now.since(sandbox.created_at).as_secs()),
    ]
}

/// A document for people: one line per value.
fn lines(value: &Value, indent: &str) -> String {
    let Value::Object(fields) = value else { return String::new() };
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        text += &match value {
            Value::Object(inner) if inner.is_empty() => continue,
            Value::Object(_) => format!("{indent}{name}\n{}", lines(value, &format!("{indent}  "))),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(shown).collect();
                format!("{indent}{name:<12}  {}\n", items.join(" "))
            }
            value => format!("{indent}{name:<12}  {}\n", shown(value)),
        };
    }
    text
}

fn shown(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
