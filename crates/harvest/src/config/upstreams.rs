//! Turns the tables `[upstreams.NAME]` into the gateway's upstreams. A table of a built-in one
//! changes only what it says.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow};
use harvest_gateway::{PrivateHosts, Upstream, UpstreamError, Upstreams, vault::SecretName};
use harvest_proto::{UpstreamKind, UpstreamName};

use super::{Env, keys::UpstreamTable};
use crate::printer::Advice;

const TABLE: &str = "upstreams";

/// The upstreams that have settings: the built-in services and those of the file.
pub(super) fn named<T>(file: &BTreeMap<String, T>) -> impl Iterator<Item = String> + use<T> {
    let built_in = Upstreams::default();
    let services = built_in.iter().filter(|(_, one)| one.kind != UpstreamKind::Scripted);
    let mut names: Vec<String> = services.map(|(name, _)| name.to_string()).collect();
    names.extend(file.keys().filter(|name| !names.contains(name)).cloned().collect::<Vec<_>>());
    names.into_iter()
}

/// The table of an upstream, as `harvest config` names it.
pub(super) fn table_of(name: &str) -> String {
    format!("{TABLE}.{name}")
}

pub(super) fn upstreams(
    mut file: BTreeMap<String, UpstreamTable>,
    private_hosts: &[String],
    env: Env,
) -> Result<Upstreams> {
    let private_hosts = PrivateHosts::new(private_hosts.to_vec());
    named(&file).collect::<Vec<_>>().into_iter().try_fold(Upstreams::default(), |all, name| {
        let table = file.remove(&name).unwrap_or_default().resolve(&table_of(&name), env)?;
        let (name, upstream) = upstream(&all, &name, table, &private_hosts)
            .with_context(|| format!("`[{}]` cannot be used", table_of(&name)))?;
        Ok(all.with(name, upstream))
    })
}

fn upstream(
    built_in: &Upstreams,
    name: &str,
    table: UpstreamTable,
    private_hosts: &PrivateHosts,
) -> Result<(UpstreamName, Upstream)> {
    let name: UpstreamName = name.parse()?;
    let base = built_in.get(&name);
    let missing = |key: &str, example: &str| {
        Advice::new(format!("the key `{key}` is missing"), format!("add `{key} = \"{example}\"`"))
    };
    let kind = table.kind.or(base.map(|base| base.kind));
    let kind = kind.ok_or_else(|| missing("kind", UpstreamKind::OpenaiChat.as_str()))?;
    if kind == UpstreamKind::Scripted {
        return Err(anyhow!("the scripted model has no settings"));
    }
    let url = table.url.or_else(|| base.map(|base| base.url.clone()));
    let url = url.ok_or_else(|| missing("url", "http://localhost:11434/v1"))?;
    if let Some(secret) = &table.secret {
        secret.parse::<SecretName>().with_context(|| format!("`secret` is `{secret}`"))?;
    }
    // Another secret replaces both built-in ones.
    let oauth_secret = base.filter(|_| table.secret.is_none()).and_then(|b| b.oauth_secret.clone());
    let secret = table.secret.or_else(|| base.and_then(|base| base.secret.clone()));
    let upstream = Upstream { kind, url, secret, oauth_secret };
    upstream.check_url(private_hosts).map_err(unusable_url)?;
    Ok((name, upstream))
}

pub(super) fn unusable_url(error: UpstreamError) -> anyhow::Error {
    match &error {
        UpstreamError::PlainHttp(host) => {
            let hint = format!("use https, or add \"{host}\" to the key `private_hosts`");
            Advice::new(error.to_string(), hint).into()
        }
        UpstreamError::InvalidUrl(_) => anyhow!(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{cli::GlobalFlags, config::Config, printer::hint_of};

    fn load(text: &str, vars: &[(&str, &str)]) -> Result<Upstreams> {
        let env = |name: &str| vars.iter().find(|var| var.0 == name).map(|var| var.1.to_owned());
        Ok(Config::merge(&GlobalFlags::default(), &env, crate::config::parse(text)?)?.upstreams)
    }

    fn get(upstreams: &Upstreams, name: &str) -> Upstream {
        upstreams.get(&name.parse().unwrap()).unwrap().clone()
    }

    #[test]
    fn file_adds_upstreams_and_changes_built_in_ones() {
        let text = "[upstreams.my-own]\nkind = \"openai_chat\"\nurl = \"http://localhost:11434/v1\"\n\
                    [upstreams.anthropic]\nurl = \"https://proxy.example\"\n";
        let vars = [
            ("HARVEST_UPSTREAMS_MY_OWN_SECRET", "OWN_KEY"),
            ("HARVEST_UPSTREAMS_OPENAI_URL", "http://10.0.0.5/v1"),
        ];
        let upstreams = load(text, &vars).unwrap();
        let own = get(&upstreams, "my-own");
        assert_eq!(
            (own.kind, own.url.as_str()),
            (UpstreamKind::OpenaiChat, "http://localhost:11434/v1")
        );
        assert_eq!(own.secret.as_deref(), Some("OWN_KEY"));
        let anthropic = get(&upstreams, "anthropic");
        let built_in = get(&Upstreams::default(), "anthropic");
        assert_eq!(anthropic, Upstream { url: "https://proxy.example".into(), ..built_in });
        assert_eq!(get(&upstreams, "openai").url, "http://10.0.0.5/v1");
        assert_eq!(load("", &[]).unwrap(), Upstreams::default());
    }

    #[test]
    fn unusable_upstreams_are_refused_with_a_hint() {
        for (text, message, hint) in [
            ("[upstreams.a]\nurl = \"https://a.example\"", "`kind` is missing", "openai_chat"),
            ("[upstreams.a]\nkind = \"openai\"", "`url` is missing", "url = "),
            (
                "[upstreams.a]\nkind = \"openai\"\nurl = \"http://a.example\"",
                "plain http to `a.example`",
                "private_hosts",
            ),
            (
                "[upstreams.a]\nkind = \"openai\"\nurl = \"a.example\"",
                "not an http or https URL",
                "",
            ),
            (
                "[upstreams.A_B]\nkind = \"openai\"\nurl = \"https://a.example\"",
                "invalid upstream `A_B`",
                "",
            ),
            (
                "[upstreams.a]\nkind = \"openai\"\nurl = \"https://a.example\"\nsecret = \"a b\"",
                "`secret` is `a b`",
                "",
            ),
            ("[upstreams.scripted]\nurl = \"https://a.example\"", "has no settings", ""),
            ("[upstreams.a]\nkind = \"opnai\"", "unknown kind of upstream `opnai`", ""),
        ] {
            let error = load(text, &[]).unwrap_err();
            assert!(format!("{error:#}").contains(message), "{error:#}");
            assert!(hint_of(&error).unwrap_or_default().contains(hint), "{error:#}");
        }
    }
}
