//! `harvest net`: shows what sandboxes may connect to.

use anyhow::Result;
use harvest_proto::{
    NetworkPolicy,
    api::{AllowedName, NameSource, NetworkRules},
};

use crate::{Invocation, cli::NetCommand, client::Client, table};

pub(crate) async fn run(ctx: &Invocation, verb: &NetCommand) -> Result<u8> {
    let NetCommand::Ls { session, repository } = verb;
    let client = Client::find(&ctx.config)?;
    let path = match (session, repository) {
        (Some(typed), _) => format!("/v1/sessions/{}/network", ctx.session(typed).await?.1),
        (None, Some(name)) => {
            format!("/v1/repositories/{}/network", client.repository(name).await?.name)
        }
        (None, None) => "/v1/network".to_owned(),
    };
    let rules: NetworkRules = client.get(&path).await?;
    let row = |allowed: &AllowedName| [allowed.name.clone(), describe_source(allowed)];
    ctx.print.result(&rules, |rules| match rules.names.is_empty() {
        true => String::new(),
        false => table::plain(["NAME", "FROM"], rules.names.iter().map(row)),
    })?;
    match rules.policy {
        NetworkPolicy::None => {
            ctx.print.note("Network policy none: only the model and the session's repositories");
        }
        NetworkPolicy::Trusted => {
            ctx.print.note("Network policy trusted: these names on ports 80 and 443");
            ctx.print.hint(ALLOW_HINT);
        }
    }
    Ok(0)
}

const ALLOW_HINT: &str = "add a name to the key `trusted` in harvest.toml and restart the server";

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
            describe_source(&AllowedName { name: "a.org".to_owned(), source, tool })
        };
        assert_eq!(describe(NameSource::BuiltIn, Some("pip")), "built in (pip)");
        assert_eq!(describe(NameSource::Host, Some("npm")), "this host's npm");
        assert_eq!(describe(NameSource::Config, None), "config");
    }
}
