//! Turns the tables `[agents.NAME]` into the agents that the server adds to the built-in ones.

use std::{collections::BTreeMap, str::FromStr};

use anyhow::{Context, Result, bail};
use harvest_gateway::Upstreams;
use harvest_proto::{AgentName, bridge::AgentProgram};
use harvest_session::{ConfiguredAgent, ConfiguredAgents};
use serde::Deserialize;

use super::{
    Env, List,
    keys::{AgentTable, HAS_DEFAULT},
};
use crate::printer::Advice;

/// Variables, as `NAME=VALUE` separated by commas in a variable.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(transparent)]
pub(super) struct Variables(BTreeMap<String, String>);

impl FromStr for Variables {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let List(pairs) = text.parse().unwrap_or_default();
        let pair = |pair: String| match pair.split_once('=') {
            Some((name, value)) => Ok((name.to_owned(), value.to_owned())),
            None => Err(format!("`{pair}` is not NAME=VALUE")),
        };
        pairs.into_iter().map(pair).collect::<Result<_, _>>().map(Self)
    }
}

/// The table of an agent, as `harvest config` names it.
pub(super) fn table_of(name: &AgentName) -> String {
    format!("agents.{name}")
}

pub(super) fn agents(
    file: BTreeMap<String, AgentTable>,
    upstreams: &Upstreams,
    env: Env,
) -> Result<ConfiguredAgents> {
    let one = |(name, table): (String, AgentTable)| {
        agent(&name, table, upstreams, env)
            .with_context(|| format!("`[agents.{name}]` cannot be used"))
    };
    file.into_iter().map(one).collect()
}

fn agent(
    name: &str,
    table: AgentTable,
    upstreams: &Upstreams,
    env: Env,
) -> Result<(AgentName, ConfiguredAgent)> {
    let name: AgentName = name.parse()?;
    if AgentName::BUILT_IN.contains(&name) {
        bail!(Advice::new(format!("`{name}` is a built-in agent"), "choose another name"));
    }
    let table = table.resolve(&table_of(&name), env)?;
    let List(command) = table.command.unwrap_or_default();
    if command.first().is_none_or(String::is_empty) {
        let hint = "add `command = [\"PROGRAM\", \"ARGUMENT\"]`";
        bail!(Advice::new("the key `command` is missing or names no program", hint));
    }
    let Variables(env) = table.env.unwrap_or_default();
    check_variables(&command, &env)?;
    let upstream = table.upstream.expect(HAS_DEFAULT);
    if upstreams.get(&upstream).is_none() {
        let known: Vec<_> = upstreams.iter().map(|(name, _)| format!("`{name}`")).collect();
        let hint = format!("use {}, or add `[upstreams.{upstream}]`", known.join(", "));
        bail!(Advice::new(format!("there is no upstream `{upstream}`"), hint));
    }
    Ok((name, ConfiguredAgent { program: AgentProgram { command, env }, upstream }))
}

/// Refuses what no process can be started with.
fn check_variables(command: &[String], env: &BTreeMap<String, String>) -> Result<()> {
    if command.iter().chain(env.values()).any(|text| text.contains('\0')) {
        bail!("a NUL character is in `command` or `env`");
    }
    let bad = env.keys().find(|name| name.is_empty() || name.contains(['=', '\0']));
    bad.map_or(Ok(()), |name| bail!("`{name}` in `env` is not the name of a variable"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::GlobalFlags, config::Config, printer::hint_of};

    fn load(text: &str, vars: &[(&str, &str)]) -> Result<ConfiguredAgents> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        Ok(Config::merge(&GlobalFlags::default(), &env, crate::config::parse(text)?)?.agents)
    }

    #[test]
    fn file_and_variables_add_agents() {
        let text = "[agents.own]\ncommand = [\"own\", \"--acp\"]\nupstream = \"anthropic\"\n\
                    env = { URL = \"{model_url}\" }\n\
                    [agents.other-1]\ncommand = [\"other\"]\n";
        let vars = [("HARVEST_AGENTS_OTHER_1_ENV", "A=1,B=2=3")];
        let agents = load(text, &vars).unwrap();
        let get = |name: &str| &agents[&name.parse().unwrap()];
        assert_eq!(get("own").program.command, ["own", "--acp"]);
        assert_eq!(get("own").program.env["URL"], "{model_url}");
        assert_eq!(get("own").upstream, "anthropic");
        let other = get("other-1");
        assert_eq!(other.upstream, "scripted");
        assert_eq!((&*other.program.env["A"], &*other.program.env["B"]), ("1", "2=3"));
        assert!(load("", &[]).unwrap().is_empty());
    }

    #[test]
    fn unusable_agents_are_refused_with_a_hint() {
        for (text, message, hint) in [
            ("[agents.a]", "`command` is missing", "command = "),
            ("[agents.a]\ncommand = []", "`command` is missing", "command = "),
            ("[agents.claude]\ncommand = [\"a\"]", "`claude` is a built-in agent", "another name"),
            ("[agents.A]\ncommand = [\"a\"]", "invalid agent `A`", ""),
            ("[agents.a]\ncommand = [\"a\"]\nupstream = \"b\"", "no upstream `b`", "[upstreams.b]"),
            ("[agents.a]\ncommand = [\"a\"]\nenv = { \"A=B\" = \"\" }", "`A=B` in `env`", ""),
            ("[agents.a]\ncomand = [\"a\"]", "unknown field `comand`", "`command`"),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(format!("{error:#}").contains(message), "{error:#}");
            assert!(hint_of(&error).unwrap_or_default().contains(hint), "{error:#}");
        }
    }
}
