//! `harvest net`: shows and changes what sandboxes may connect to.

use anyhow::Result;
use harvest_proto::{
    NetworkPolicy, RuleTarget, RuleVerdict,
    api::{AllowedName, NameSource, NetworkLogEntry, NetworkRule, NetworkRules, SetNetworkRule},
};
use reqwest::Method;

use crate::{
    Invocation,
    cli::{NetCommand, NetRuleArgs, units},
    client::{Client, path_segment},
    printer::Advice,
    table,
};

pub(crate) async fn run(ctx: &Invocation, verb: &NetCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        NetCommand::Ls { session, repository } => {
            let path = match (session, repository) {
                (Some(typed), _) => format!("/v1/sessions/{}/network", ctx.session(typed).await?.1),
                (None, Some(name)) => {
                    format!("/v1/repositories/{}/network", client.repository(name).await?.name)
                }
                (None, None) => "/v1/network".to_owned(),
            };
            list(ctx, &client.get(&path).await?)?;
        }
        NetCommand::Log { session } => {
            let path = format!("/v1/sessions/{}/network/log", ctx.session(session).await?.1);
            log(ctx, &client.all(&path).await?)?;
        }
        NetCommand::Allow { rule, private } => {
            set(ctx, &client, rule, RuleVerdict::Allow, *private).await?;
        }
        NetCommand::Deny(rule) => set(ctx, &client, rule, RuleVerdict::Deny, false).await?,
        NetCommand::Rm(args) => {
            let (path, names) = targets(ctx, &client, args).await?;
            for RuleTarget { name, .. } in names {
                client.delete(&rule_path(&path, &name)?).await?;
                ctx.print.note(format!("Removed the rules for {name}"));
            }
        }
    }
    Ok(0)
}

fn list(ctx: &Invocation, rules: &NetworkRules) -> Result<()> {
    let allowed = |one: &AllowedName| {
        let ports = [80, 443].iter().chain(&one.ports).map(u16::to_string);
        [one.name.clone(), ports.collect::<Vec<_>>().join(", "), describe_source(one)]
    };
    ctx.print.result(rules, |rules| {
        let rows: Vec<_> =
            rules.rules.iter().map(rule_row).chain(rules.names.iter().map(allowed)).collect();
        match rows.is_empty() {
            true => String::new(),
            false => table::plain(["NAME", "PORTS", "FROM"], rows),
        }
    })?;
    ctx.print.note(match rules.policy {
        NetworkPolicy::None => {
            "Network policy none: besides these, only the model and the session's repositories"
        }
        NetworkPolicy::Trusted => "Network policy trusted: package registries, and these names",
        NetworkPolicy::Full => {
            "Network policy full: every name with a public address, ports 80 and 443"
        }
    });
    Ok(())
}

fn log(ctx: &Invocation, entries: &Vec<NetworkLogEntry>) -> Result<()> {
    let row = |entry: &NetworkLogEntry| {
        [
            if entry.turn == 0 { "-".to_owned() } else { entry.turn.to_string() },
            entry.name.clone(),
            if entry.port == 0 { "-".to_owned() } else { entry.port.to_string() },
            entry.verdict.to_string(),
            entry.connections.to_string(),
            units::bytes(entry.sent),
            units::bytes(entry.received),
        ]
    };
    const HEADER: [&str; 7] = ["TURN", "NAME", "PORT", "VERDICT", "COUNT", "SENT", "RECEIVED"];
    ctx.print.result(entries, |entries| match entries.is_empty() {
        true => String::new(),
        false => table::plain(HEADER, entries.iter().map(row)),
    })?;
    if entries.is_empty() {
        ctx.print.note("No connections besides those to the model and the repositories");
    }
    Ok(())
}

fn rule_row(rule: &NetworkRule) -> [String; 3] {
    let ports = match rule.ports.is_empty() {
        true => "all".to_owned(),
        false => rule.ports.iter().map(u16::to_string).collect::<Vec<_>>().join(", "),
    };
    let private = if rule.private { ", private" } else { "" };
    let from = format!("{} rule ({}{private})", rule.verdict, rule.scope);
    [rule.name.clone(), ports, from]
}

async fn set(
    ctx: &Invocation,
    client: &Client,
    args: &NetRuleArgs,
    verdict: RuleVerdict,
    private: bool,
) -> Result<()> {
    let (path, targets) = targets(ctx, client, args).await?;
    for RuleTarget { name, ports } in targets {
        let request = client
            .request(Method::PUT, &rule_path(&path, &name)?)
            .json(&SetNetworkRule { verdict, ports, private });
        let rule: NetworkRule = client.call(request).await?;
        ctx.print.document(&rule)?;
        let done = match verdict {
            RuleVerdict::Allow => "Allowed",
            RuleVerdict::Deny => "Denied",
        };
        ctx.print.note(format!("{done} {}", describe(&rule)));
    }
    Ok(())
}

/// The path of the rule for a name, or for all names below one (`*.example.org`).
fn rule_path(path: &str, name: &str) -> Result<String> {
    path_segment(name.strip_prefix("*.").unwrap_or(name))?;
    Ok(format!("{path}/rules/{name}"))
}

fn describe(rule: &NetworkRule) -> String {
    let [name, ports, _] = rule_row(rule);
    match rule.ports.len() {
        0 => format!("{name} on all ports"),
        1 => format!("{name} on port {ports}"),
        _ => format!("{name} on ports {ports}"),
    }
}

/// The path of the rules' owner, and the names in the arguments.
async fn targets(
    ctx: &Invocation,
    client: &Client,
    args: &NetRuleArgs,
) -> Result<(String, Vec<RuleTarget>)> {
    let mut names = args.arguments.as_slice();
    let path = match (&args.repository, args.everywhere) {
        (Some(name), _) => {
            format!("/v1/repositories/{}/network", client.repository(name).await?.name)
        }
        (None, true) => "/v1/network".to_owned(),
        (None, false) => {
            let [session, rest @ ..] = names else { unreachable!("clap requires an argument") };
            if rest.is_empty() {
                anyhow::bail!(Advice::new(
                    "no host name given",
                    "write the session and then the name: `harvest net allow SESSION example.org`"
                ));
            }
            names = rest;
            format!("/v1/sessions/{}/network", ctx.session(session).await?.1)
        }
    };
    let parsed = names.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    Ok((path, parsed))
}

fn describe_source(allowed: &AllowedName) -> String {
    match (allowed.source, &allowed.tool) {
        (NameSource::BuiltIn, Some(tool)) => format!("built in ({tool})"),
        (NameSource::BuiltIn, None) => "built in".to_owned(),
        (NameSource::Host, Some(tool)) => format!("this host's {tool}"),
        (NameSource::Host, None) => "this host".to_owned(),
        (NameSource::Config, _) => "config".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_of_a_name_is_described() {
        let describe = |source, tool: Option<&str>| {
            let tool = tool.map(str::to_owned);
            describe_source(&AllowedName {
                name: "a.org".to_owned(),
                source,
                tool,
                ports: Vec::new(),
            })
        };
        assert_eq!(describe(NameSource::BuiltIn, Some("pip")), "built in (pip)");
        assert_eq!(describe(NameSource::Host, Some("npm")), "this host's npm");
        assert_eq!(describe(NameSource::Config, None), "config");
    }
}
