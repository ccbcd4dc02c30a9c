//! Parses `.harvest/config.toml`. Pure, and strict: an unknown key is an error that names the known
//! ones, and every error names its line.

use std::{collections::BTreeMap, num::NonZeroU16};

use harvest_proto::{
    Money, NetworkPolicy, RuleTarget,
    api::{RepositoryConfig, RepositoryPolicy},
};
use serde::Deserialize;

/// The file, below the checkout.
pub(crate) const CONFIG_FILE: &str = ".harvest/config.toml";

// Bounds the memory of parsing, and the event with the result.
pub(crate) const MAX_CONFIG_BYTES: usize = 16 * 1024;

const MAX_PACKAGES: usize = 200;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    image: Option<ImageName>,
    #[serde(default)]
    packages: Vec<Package>,
    #[serde(default)]
    env: BTreeMap<VariableName, Value>,
    setup: Option<CommandLine>,
    test: Option<CommandLine>,
    check: Option<CommandLine>,
    #[serde(default)]
    ports: Vec<NonZeroU16>,
    #[serde(default)]
    policy: Policy,
    budget: Option<Dollars>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Policy {
    network: Option<NetworkPolicy>,
    allow: Vec<AllowedTarget>,
}

/// The content of the file; the error has several lines, with the one at fault.
pub(crate) fn parse(text: &str) -> Result<RepositoryConfig, String> {
    if text.len() > MAX_CONFIG_BYTES {
        return Err(format!("the file has more than {MAX_CONFIG_BYTES} bytes"));
    }
    let file = toml::from_str::<File>(text);
    let file = file.map_err(|error| error.to_string().trim_end().to_owned())?;
    if file.packages.len() > MAX_PACKAGES {
        return Err(format!("`packages` has more than {MAX_PACKAGES} names"));
    }
    let policy = RepositoryPolicy {
        network: file.policy.network,
        allow: file.policy.allow.into_iter().map(|one| one.0).collect(),
    };
    Ok(RepositoryConfig {
        image: file.image.map(|one| one.0),
        packages: file.packages.into_iter().map(|one| one.0).collect(),
        env: file.env.into_iter().map(|(name, value)| (name.0, value.0)).collect(),
        setup: file.setup.map(|one| one.0),
        test: file.test.map(|one| one.0),
        check: file.check.map(|one| one.0),
        ports: file.ports.into_iter().map(NonZeroU16::get).collect(),
        policy,
        budget_micros: file.budget.map(|one| one.0),
    })
}

/// A text with a form of its own, so that the parser names the line of a wrong one.
macro_rules! checked_text {
    ($name:ident, $expected:literal, $is_valid:expr) => {
        #[derive(PartialEq, Eq, PartialOrd, Ord, Deserialize)]
        #[serde(try_from = "String")]
        struct $name(String);

        impl TryFrom<String> for $name {
            type Error = &'static str;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                let is_valid: fn(&str) -> bool = $is_valid;
                if is_valid(&text) { Ok(Self(text)) } else { Err($expected) }
            }
        }
    };
}

checked_text!(
    Package,
    "a Debian package has lower-case letters, digits, `+`, `-` and `.`",
    // Not an option of apt, nor a version or a suffix that removes a package.
    |text| text.len() <= 100
        && text.starts_with(|first: char| first.is_ascii_lowercase() || first.is_ascii_digit())
        && text.ends_with(|last: char| last.is_ascii_lowercase() || last.is_ascii_digit())
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'+' | b'-' | b'.'))
        || (text.ends_with("++") && is_package_stem(text))
);
checked_text!(
    VariableName,
    "a variable has letters, digits and `_`, and does not begin with a digit or `HARVEST_`",
    |text| (1..=200).contains(&text.len())
        && !text.starts_with(|first: char| first.is_ascii_digit())
        && !text.starts_with("HARVEST_")
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
);
checked_text!(Value, "a value has no NUL character", |text| !text.contains('\0'));
checked_text!(CommandLine, "a command is not empty and has no NUL character", |text| {
    !text.trim().is_empty() && !text.contains('\0')
});
checked_text!(ImageName, "an image has letters, digits, `.`, `_` and `-`", |text| {
    (1..=100).contains(&text.len())
        && text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
});
checked_text!(AllowedTarget, "an allowed name is `NAME` or `NAME:PORT,PORT`", |text| {
    let is_name = |name: &str| {
        let name = name.strip_prefix("*.").unwrap_or(name);
        (1..=253).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
    };
    text.parse::<RuleTarget>().is_ok_and(|target| is_name(&target.name))
});

// `g++` is a package.
fn is_package_stem(text: &str) -> bool {
    let stem = text.trim_end_matches('+');
    text.len() - stem.len() == 2
        && stem.starts_with(|first: char| first.is_ascii_lowercase())
        && stem.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

#[derive(Deserialize)]
#[serde(try_from = "String")]
struct Dollars(Money);

impl TryFrom<String> for Dollars {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse().map(Self).map_err(|error: harvest_proto::InvalidMoney| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_read() {
        let config = parse(
            r#"
image = "agents"
packages = ["libpq-dev", "g++", "python3.11"]
setup = "make deps"
test = "npm test"
check = "make check"
ports = [3000, 8080]
budget = "2.50"

[env]
NODE_ENV = "development"

[policy]
network = "none"
allow = ["api.example.org", "*.example.com:5432"]
"#,
        )
        .unwrap();
        let expected = RepositoryConfig {
            image: Some("agents".into()),
            packages: ["libpq-dev", "g++", "python3.11"].map(str::to_owned).into(),
            env: [("NODE_ENV".to_owned(), "development".to_owned())].into(),
            setup: Some("make deps".into()),
            test: Some("npm test".into()),
            check: Some("make check".into()),
            ports: vec![3000, 8080],
            policy: RepositoryPolicy {
                network: Some(NetworkPolicy::None),
                allow: ["api.example.org", "*.example.com:5432"].map(str::to_owned).into(),
            },
            budget_micros: Some(Money::from_micros(2_500_000)),
        };
        assert_eq!(config, expected);
        assert_eq!(parse("").unwrap(), RepositoryConfig::default());
    }

    #[test]
    fn unknown_key_names_the_known_ones() {
        let error = parse("ports = [1]\nimages = \"x\"\n").unwrap_err();
        for part in ["line 2", "unknown field `images`", "`image`", "`packages`", "`budget`"] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let error = parse("[policy]\nnet = \"full\"\n").unwrap_err();
        assert!(error.contains("`network`") && error.contains("`allow`"), "{error}");
    }

    #[test]
    fn wrong_value_is_refused_with_its_line() {
        for wrong in [
            "packages = [\"-o=Dpkg::Pre-Invoke::=sh\"]",
            "packages = [\"curl=1.0\"]",
            "packages = [\"sudo-\"]",
            "packages = [\"sudo+\"]",
            "packages = [\"curl; id\"]",
            "packages = \"curl\"",
            "setup = \" \"",
            "check = \"a\\u0000b\"",
            "ports = [0]",
            "ports = [65536]",
            "budget = \"lots\"",
            "budget = 2.5",
            "image = \"../../etc\"",
            "policy = { network = \"everything\" }",
            "policy = { allow = [\"a b\"] }",
            "policy = { allow = [\"a.org:http\"] }",
            "env = { HARVEST_HOME = \"/\" }",
            "env = { \"A B\" = \"1\" }",
            "env = { A = 1 }",
            "env = { A = \"1\" ",
        ] {
            let error =
                parse(&format!("ports = [1]\n{wrong}\n").replace("ports = [1]\nports", "\nports"))
                    .unwrap_err();
            assert!(error.contains("line 2"), "{wrong}: {error}");
        }
    }

    #[test]
    fn large_file_is_refused() {
        let long = format!("setup = \"{}\"", "x".repeat(MAX_CONFIG_BYTES));
        assert!(parse(&long).unwrap_err().contains("more than 16384 bytes"));
        let many = format!("packages = [{}]", "\"a\",".repeat(MAX_PACKAGES + 1));
        assert!(parse(&many).unwrap_err().contains("more than 200"));
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "\\PC{0,200}") {
            let _no_panic = parse(&text);
        }
    }
}
