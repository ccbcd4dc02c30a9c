//! `harvest sandbox ls` and `inspect`.

use anyhow::Result;
use harvest_proto::api::{Sandbox, SandboxList, SandboxNetwork, SandboxStatus, VolumeMount};
use serde_json::Value;

use super::super::ls::age;
use crate::{Invocation, backend::Backend, resolve};

pub(super) async fn ls(ctx: &Invocation, backend: &Backend) -> Result<()> {
    let SandboxList { items, damaged } = backend.get("/v1/sandboxes").await?;
    for damaged in &damaged {
        ctx.print.note(format!("{}: {}", damaged.id, damaged.error));
        ctx.print
            .hint(format!("`harvest sandbox rm --force {}` removes the rest of it", damaged.id));
    }
    if items.is_empty() && damaged.is_empty() && !ctx.print.json {
        ctx.print.note("No sandboxes yet");
        ctx.print.hint(
            "`harvest sandbox create` creates one; `harvest exec -- COMMAND` runs a command in a fresh one",
        );
        return Ok(());
    }
    ctx.print.list(&items, ["ID", "STATE", "IMAGE", "OWNER", "NETWORK", "AGE"], row)
}

pub(super) async fn inspect(ctx: &Invocation, backend: &Backend, typed: &str) -> Result<()> {
    let id = resolve::sandbox(backend, typed).await?;
    let sandbox: Sandbox = backend.get(&format!("/v1/sandboxes/{id}")).await?;
    let mut shown = serde_json::to_value(&sandbox)?;
    shown["volumes"] = sandbox.volumes.iter().map(volume).collect();
    ctx.print.result(&sandbox, |_| lines(&shown, ""))
}

/// The format of `--volume`.
fn volume(mount: &VolumeMount) -> String {
    let mode = if mount.read_only { ":ro" } else { "" };
    format!("{}:{}{mode}", mount.name, mount.inside)
}

fn row(sandbox: &Sandbox) -> [String; 6] {
    let state = match sandbox.state {
        SandboxStatus::Running => "running",
        SandboxStatus::Dead => "dead",
    };
    let network = match (sandbox.network, &sandbox.door) {
        (SandboxNetwork::Gateway, Some(door)) => {
            let names = door.allow.iter().map(|name| format!(" + {name}"));
            format!("{}{}", door.policy, names.collect::<String>())
        }
        (SandboxNetwork::None, _) => "none".to_owned(),
        (SandboxNetwork::Gateway, None) => "gateway".to_owned(),
        (SandboxNetwork::Host, _) => "host".to_owned(),
    };
    [
        sandbox.id.to_string(),
        state.to_owned(),
        sandbox.image.clone().unwrap_or_else(|| "–".to_owned()),
        sandbox.owner.to_string(),
        network,
        age(sandbox.created_at),
    ]
}

/// Formats a JSON object with one line per value.
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
