//! Parses an image's documents: index, manifest, configuration. Chooses the platform. Pure.

use std::collections::BTreeMap;

use harvest_engine::ImageConfig;
use serde::Deserialize;

use super::{PullError, reference::Digest};

// The limit of other container engines; overlayfs can stack 500.
const MAX_LAYERS: usize = 127;

/// A reference to a blob or manifest in the registry.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Descriptor {
    #[serde(rename = "mediaType", default)]
    media_type: String,
    digest: String,
    pub(super) size: u64,
    platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
}

#[derive(Deserialize)]
struct RawManifest {
    #[serde(rename = "schemaVersion", default)]
    schema: u32,
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// A parsed manifest.
#[derive(Debug)]
pub(super) enum Manifest {
    /// The entry of an index for this host's platform.
    Index(Descriptor),
    Image {
        config: Descriptor,
        layers: Vec<Descriptor>,
    },
}

impl Descriptor {
    pub(super) fn digest(&self) -> Result<Digest, PullError> {
        self.digest.parse().map_err(|reason: &str| invalid("manifest", reason))
    }
}

/// Parses an index or a manifest.
pub(super) fn parse(bytes: &[u8]) -> Result<Manifest, PullError> {
    let document: RawManifest =
        serde_json::from_slice(bytes).map_err(|error| invalid("manifest", &error.to_string()))?;
    if document.schema != 2 {
        return Err(invalid("manifest", "its schema version is not supported"));
    }
    if let Some(manifests) = document.manifests {
        return choose_platform(manifests).map(Manifest::Index);
    }
    let (Some(config), Some(layers)) = (document.config, document.layers) else {
        return Err(invalid("manifest", "it lists neither images nor layers"));
    };
    if layers.len() > MAX_LAYERS || layers.is_empty() {
        return Err(invalid("manifest", "it has no layers, or more than 127"));
    }
    match layers.iter().find(|layer| !is_layer(&layer.media_type)) {
        Some(other) => Err(invalid(
            "manifest",
            &format!("`{}` is not a supported layer type", other.media_type),
        )),
        None => Ok(Manifest::Image { config, layers }),
    }
}

// The compression is detected from the bytes. Non-distributable layers are not in the registry.
fn is_layer(media_type: &str) -> bool {
    let known =
        ["application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"];
    known.iter().any(|kind| {
        media_type
            .strip_prefix(kind)
            .is_some_and(|rest| matches!(rest, "" | "+gzip" | "+zstd" | ".gzip" | ".zstd"))
    })
}

fn choose_platform(manifests: Vec<Descriptor>) -> Result<Descriptor, PullError> {
    let wanted = architecture();
    let fits = |descriptor: &&Descriptor| {
        descriptor
            .platform
            .as_ref()
            .is_some_and(|platform| platform.os == "linux" && platform.architecture == wanted)
    };
    if let Some(found) = manifests.iter().find(fits) {
        return Ok(found.clone());
    }
    let named = manifests.iter().filter_map(|descriptor| descriptor.platform.as_ref());
    let mut found: Vec<String> =
        named.take(32).map(|one| format!("{}/{}", one.os, one.architecture)).collect();
    found.sort();
    found.dedup();
    Err(PullError::Platform { wanted: format!("linux/{wanted}"), found: found.join(", ") })
}

/// This host's architecture in the names of OCI.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}

#[derive(Deserialize)]
struct Configuration {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    config: Option<Runtime>,
    rootfs: RootFs,
}

#[derive(Deserialize, Default)]
struct Runtime {
    #[serde(rename = "Env")]
    env: Option<Vec<String>>,
    #[serde(rename = "User")]
    user: Option<String>,
    #[serde(rename = "WorkingDir")]
    workdir: Option<String>,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// Parses an image's configuration: the digest of each uncompressed layer, and the settings of
/// commands.
pub(super) fn parse_config(
    bytes: &[u8],
    layers: usize,
) -> Result<(Vec<Digest>, ImageConfig), PullError> {
    let wrong = |reason: &str| invalid("image's configuration", reason);
    let document: Configuration =
        serde_json::from_slice(bytes).map_err(|error| wrong(&error.to_string()))?;
    if (document.os.as_str(), document.architecture.as_str()) != ("linux", architecture()) {
        let found = format!("{}/{}", document.os, document.architecture);
        return Err(PullError::Platform { wanted: format!("linux/{}", architecture()), found });
    }
    let contents: Result<Vec<Digest>, &str> =
        document.rootfs.diff_ids.iter().map(|text| text.parse()).collect();
    let contents = contents.map_err(wrong)?;
    if contents.len() != layers {
        return Err(wrong("its number of layers differs from the manifest's"));
    }
    Ok((contents, image_config(document.config.unwrap_or_default()).map_err(wrong)?))
}

fn image_config(runtime: Runtime) -> Result<ImageConfig, &'static str> {
    let pairs = runtime.env.unwrap_or_default();
    let pair = |text: &String| {
        text.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
    };
    let env: BTreeMap<String, String> = pairs
        .iter()
        .filter_map(pair)
        .filter(|(name, value)| !name.is_empty() && !(name.clone() + value).contains('\0'))
        .collect();
    let workdir = runtime.workdir.filter(|path| !path.is_empty()).unwrap_or_else(|| "/".to_owned());
    if !workdir.starts_with('/') || workdir.contains('\0') {
        return Err("its working directory is not an absolute path");
    }
    let user = user(&runtime.user.unwrap_or_default())?;
    Ok(ImageConfig { env, user, workdir, ..ImageConfig::default() })
}

// The supervisor looks up user names in the image, but not group names.
fn user(text: &str) -> Result<String, &'static str> {
    let (name, group) =
        text.split_once(':').map_or((text, None), |(name, group)| (name, Some(group)));
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'$');
    if !name.bytes().all(plain) || name.len() > 64 {
        return Err("its user name is invalid");
    }
    let beyond = |text: &str| text.parse::<u64>().is_ok_and(|id| id > 65_535);
    if beyond(name) || group.is_some_and(beyond) {
        return Err("its user or group id is above 65535");
    }
    let group = group.filter(|group| group.parse::<u16>().is_ok());
    Ok(match (name, group) {
        ("", _) => "root".to_owned(),
        (name, Some(group)) => format!("{name}:{group}"),
        (name, None) => name.to_owned(),
    })
}

fn invalid(what: &'static str, reason: &str) -> PullError {
    PullError::Document { what, reason: reason.chars().take(300).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_sets_env_user_and_workdir() {
        let digest = Digest::of(b"");
        let text = |user: &str, workdir: &str| {
            format!(
                r#"{{"os":"linux","architecture":"{}","config":{{"Env":["PATH=/bin:/x=y","BAD","=x"],"User":"{user}","WorkingDir":"{workdir}"}},"rootfs":{{"diff_ids":["{digest}"]}}}}"#,
                architecture()
            )
        };
        let (contents, config) = parse_config(text("node:staff", "/app").as_bytes(), 1).unwrap();
        assert_eq!(
            (contents, config.user.as_str(), config.workdir.as_str()),
            (vec![digest.clone()], "node", "/app")
        );
        assert_eq!(config.env, [("PATH".to_owned(), "/bin:/x=y".to_owned())].into());
        for (given, expected) in [("", "root"), ("1000:50", "1000:50"), ("0", "0")] {
            assert_eq!(parse_config(text(given, "").as_bytes(), 1).unwrap().1.user, expected);
        }
        for (user, workdir) in [("70000", ""), ("1:70000", ""), ("a b", ""), ("", "relative")] {
            assert!(parse_config(text(user, workdir).as_bytes(), 1).is_err(), "{user} {workdir}");
        }
        assert!(parse_config(text("", "").as_bytes(), 2).is_err());
    }

    #[test]
    fn index_without_this_platform_lists_others() {
        let entry = |architecture: &str| {
            format!(
                r#"{{"digest":"{}","size":1,"platform":{{"os":"linux","architecture":"{architecture}"}}}}"#,
                Digest::of(architecture.as_bytes())
            )
        };
        let text = format!(
            r#"{{"schemaVersion":2,"manifests":[{},{}]}}"#,
            entry("mips"),
            entry(architecture())
        );
        let Ok(Manifest::Index(found)) = parse(text.as_bytes()) else { panic!("no index") };
        assert_eq!(found.digest().unwrap(), Digest::of(architecture().as_bytes()));
        let text = format!(r#"{{"schemaVersion":2,"manifests":[{}]}}"#, entry("mips"));
        let error = parse(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, format!("the image is for linux/mips, not for linux/{}", architecture()));
    }
}
