//! Tests of the directory store.

use super::*;

#[test]
fn hostile_store_directory_listing_ends_after_limit() {
    let root = tempfile::tempdir().unwrap();
    for name in ["a/1", "a/2", "b/1", "b/2", "c"] {
        let path = root.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, "x").unwrap();
    }
    let count = |limit| {
        let mut objects = Vec::new();
        walk(root.path(), "", "", limit, &mut objects).unwrap();
        objects.len()
    };
    assert_eq!([count(5), count(4), count(2)], [5, 5, 3]);
}

#[test]
fn local_listing_reads_only_directories_matching_prefix() {
    for (folder, prefix, expected) in [
        ("etcd/", "etcd/main_v", true),
        ("etcd/main_v2/", "etcd/main_v", true),
        ("etcd/main/", "etcd/main_v", false),
        ("lost+found/", "etcd/main_v", false),
        ("etcd2/", "etcd/main_v", false),
        ("lost+found/", "main_v", false),
        ("any/", "", true),
    ] {
        assert_eq!(may_contain(folder, prefix), expected, "{folder} {prefix}");
    }
}

#[tokio::test]
async fn listing_finds_exactly_objects_with_prefix() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::new(dir.path());
    for key in [
        "etcd/main_v1",
        "etcd/main_v2/x",
        "etcd/main",
        "etcd/other/main_v1",
        "main_v1",
    ] {
        store.put(key, Bytes::from_static(b"x")).await.unwrap();
    }
    let listed = store.list("etcd/main_v").await.unwrap();
    let keys: Vec<&str> = listed.iter().map(|object| object.key.as_str()).collect();
    assert_eq!(keys, ["etcd/main_v1", "etcd/main_v2/x"]);
    assert_eq!(store.list("").await.unwrap().len(), 5);
    assert_eq!(store.list("nothing/there").await.unwrap(), []);
}

/// A store of another owner (`owned_by`) lists an unfinished file only after ten minutes without a write, because the
/// process that writes the file may still run.
#[tokio::test]
async fn unfinished_files_of_other_owners_are_listed_only_if_abandoned() {
    let dir = tempfile::tempdir().unwrap();
    let owned = |owner: &str| LocalStore::new(dir.path()).owned_by(owner);
    let count = async |store: &LocalStore| store.unfinished("etcd/").await.unwrap().len();
    let unowned = LocalStore::new(dir.path());
    for store in [&owned("one"), &unowned] {
        let upload = store.begin("etcd/main-a").await.unwrap();
        std::mem::forget(upload);
    }
    // A store without an owner lists the unfinished files of all owners.
    assert_eq!(count(&unowned).await, 2);
    let found = owned("one").unfinished("etcd/").await.unwrap();
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].key, "etcd/main-a");
    assert_eq!(owner_of(&found[0].id), owned("one").owner.as_deref());
    assert_eq!(count(&owned("two")).await, 0);
    let long_ago = SystemTime::now() - ABANDONED_AFTER;
    for entry in std::fs::read_dir(dir.path().join("etcd")).unwrap() {
        let file = std::fs::File::options()
            .write(true)
            .open(entry.unwrap().path());
        file.unwrap().set_modified(long_ago).unwrap();
    }
    assert_eq!(count(&owned("two")).await, 2);
    for unfinished in owned("two").unfinished("etcd/").await.unwrap() {
        owned("two").discard(&unfinished).await.unwrap();
    }
    assert_eq!(count(&unowned).await, 0);
}

fn text(error: &Error) -> String {
    error.to_string()
}

/// Invariant 13: each namespace can use only the objects in its own directory. For the operator's namespace, this is
/// the root directory.
#[tokio::test]
async fn invariant_13_each_namespace_has_its_own_directory() {
    let dir = tempfile::tempdir().unwrap();
    let own = LocalStore::new(dir.path());
    let [a, b] = ["team-a", "team-b"].map(|namespace| own.for_namespace(namespace, None));
    assert_eq!(a.list("").await.unwrap(), []);
    assert_eq!(a.head("etcd/main").await.unwrap(), None);
    assert_eq!(a.unfinished("etcd/").await.unwrap(), []);
    a.delete("etcd/main").await.unwrap();
    for (store, content) in [(&own, "own"), (&a, "a"), (&b, "bb")] {
        store.put("etcd/main", content.into()).await.unwrap();
    }
    assert!(dir.path().join("etcd/main").is_file());
    assert!(dir.path().join("namespaces/team-a/etcd/main").is_file());
    assert_eq!(
        a.location(),
        format!("{}/namespaces/team-a", own.location())
    );
    assert_eq!(a.list("").await.unwrap().len(), 1);
    b.delete("etcd/main").await.unwrap();
    assert_eq!(a.head("etcd/main").await.unwrap().unwrap().size, 1);
    for key in ["../team-b/etcd/main", "/etc/passwd", "etcd/../../../main"] {
        let error = a.put(key, "x".into()).await.unwrap_err();
        assert!(text(&error).contains("remove leading slashes"), "{error}");
    }
    // If the root directory does not exist, the volume is not mounted, so all requests to the store of a namespace
    // fail.
    let unmounted = LocalStore::new(dir.path().join("absent")).for_namespace("team-a", None);
    for error in [
        unmounted.put("main", "x".into()).await.unwrap_err(),
        unmounted.list("").await.unwrap_err(),
        unmounted.head("main").await.unwrap_err(),
    ] {
        assert!(matches!(error, Error::NoSuchBucket { .. }), "{error}");
    }
}

/// Invariant 13: the store of a namespace rejects symbolic links, which other software with access to the volume can
/// create.
#[tokio::test]
async fn invariant_13_namespace_cannot_use_symlinks() {
    let dir = tempfile::tempdir().unwrap();
    let own = LocalStore::new(dir.path());
    let victim = own.for_namespace("victim", None);
    victim.put("etcd/main", "secret".into()).await.unwrap();
    let tenant = own.for_namespace("team-a", None);
    tenant.put("plain/main", "x".into()).await.unwrap();
    let base = dir.path().join("namespaces/team-a");
    let link = |to: &str, at: PathBuf| {
        let to = dir.path().join("namespaces").join(to);
        std::os::unix::fs::symlink(to, at).unwrap();
    };
    link("victim/etcd", base.join("etcd"));
    link("victim/etcd/main", base.join("plain/linked"));
    link("victim", dir.path().join("namespaces/team-b"));
    let linked = own.for_namespace("team-b", None);
    for (store, key) in [
        (&tenant, "etcd/main"),
        (&tenant, "plain/linked"),
        (&linked, "etcd/main"),
    ] {
        let unfinished = Unfinished {
            key: key.to_owned(),
            id: "main".to_owned(),
            begun_unix_seconds: 0,
        };
        for error in [
            store.put(key, "x".into()).await.unwrap_err(),
            store.get(key).await.err().unwrap(),
            store.head(key).await.unwrap_err(),
            store.delete(key).await.unwrap_err(),
            store.discard(&unfinished).await.unwrap_err(),
        ] {
            assert!(text(&error).contains("is a symbolic link"), "{error}");
        }
    }
    assert!(linked.list("").await.is_err());
    assert!(tenant.unfinished("etcd/").await.is_err());
    let keys = tenant.list("etcd/").await.unwrap();
    assert_eq!(keys, [], "a listing must not follow symbolic links");
    assert_eq!(victim.head("etcd/main").await.unwrap().unwrap().size, 6);
    // The store of the operator's own namespace follows symbolic links.
    let through = "namespaces/team-a/etcd/main";
    assert!(own.head(through).await.unwrap().is_some());
}

#[tokio::test]
async fn quota_of_namespace_limits_uploads() {
    let dir = tempfile::tempdir().unwrap();
    let own = LocalStore::new(dir.path());
    let store = own.for_namespace("team-a", Some(1000));
    let other = own.for_namespace("team-b", Some(1000));
    store.put("one", vec![0; 600].into()).await.unwrap();
    // The object `one` has 600 bytes, so `upload` reaches the quota of 1000 bytes with 400 bytes. The write of one more
    // byte fails.
    let mut upload = store.begin("two").await.unwrap();
    upload.write(vec![0; 400].into()).await.unwrap();
    let error = upload.write(vec![0; 1].into()).await.unwrap_err();
    for part in [
        "namespace team-a",
        "1000 of 1000 bytes",
        "backups.localQuota",
    ] {
        assert!(text(&error).contains(part), "{error}");
    }
    // The quota counts the bytes of `upload`, although `upload` is not committed.
    let error = store.begin("three").await.err().unwrap();
    assert!(matches!(error, Error::Full(_)), "{error}");
    upload.abort().await.unwrap();
    store.put("two", vec![0; 400].into()).await.unwrap();
    assert!(
        store.begin("three").await.is_err(),
        "the quota must be used up"
    );
    other.put("one", vec![0; 1000].into()).await.unwrap();
    own.put("one", vec![0; 5000].into()).await.unwrap();
    store.delete("one").await.unwrap();
    store.put("three", vec![0; 600].into()).await.unwrap();
}

#[tokio::test]
async fn dropping_upload_removes_unfinished_file() {
    let dir = tempfile::tempdir().unwrap();
    let store = LocalStore::new(dir.path());
    let mut upload = store.begin("key").await.unwrap();
    upload.write("content".into()).await.unwrap();
    assert_eq!(store.unfinished("").await.unwrap().len(), 1);
    drop(upload);
    while !store.unfinished("").await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(store.list("").await.unwrap(), []);
}
