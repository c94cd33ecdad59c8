// chartrender: a small offline Helm-template renderer (Go text/template + sprig), for chart tests only. It does not do tags, import-values,
// the order of hooks and installs, --set or OCI; `lookup` finds what -lookup names.
package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"sort"
	"strings"
	"text/template"

	"github.com/BurntSushi/toml"
	"github.com/Masterminds/sprig"
	"github.com/ghodss/yaml"
	"github.com/xeipuuv/gojsonschema"
)

type M = map[string]interface{}

type chart struct {
	meta   M
	values M
	schema []byte
	files  map[string][]byte // relative path -> data (templates and others)
	subs   []*chart
	name   string
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(1)
	}
}

func fromFiles(files map[string][]byte) *chart {
	c := &chart{files: map[string][]byte{}, values: M{}, meta: M{}}
	subs := map[string]map[string][]byte{}
	for p, d := range files {
		if strings.HasPrefix(p, "charts/") {
			rest := strings.TrimPrefix(p, "charts/")
			if strings.HasSuffix(rest, ".tgz") && !strings.Contains(rest, "/") {
				fs := untgz(d)
				c.subs = append(c.subs, fromFiles(fs))
				continue
			}
			parts := strings.SplitN(rest, "/", 2)
			if len(parts) == 2 {
				if subs[parts[0]] == nil {
					subs[parts[0]] = map[string][]byte{}
				}
				subs[parts[0]][parts[1]] = d
			}
			continue
		}
		switch p {
		case "Chart.yaml":
			must(yaml.Unmarshal(d, &c.meta))
		case "values.yaml":
			must(yaml.Unmarshal(d, &c.values))
		case "values.schema.json":
			c.schema = d
		}
		c.files[p] = d
	}
	for _, fs := range subs {
		c.subs = append(c.subs, fromFiles(fs))
	}
	if c.values == nil {
		c.values = M{}
	}
	c.name, _ = c.meta["name"].(string)
	sort.Slice(c.subs, func(i, j int) bool { return c.subs[i].name < c.subs[j].name })
	return c
}

func untgz(d []byte) map[string][]byte {
	gz, err := gzip.NewReader(bytes.NewReader(d))
	must(err)
	tr := tar.NewReader(gz)
	out := map[string][]byte{}
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		must(err)
		if h.Typeflag != tar.TypeReg {
			continue
		}
		b, err := io.ReadAll(tr)
		must(err)
		if i := strings.Index(h.Name, "/"); i >= 0 {
			out[h.Name[i+1:]] = b
		}
	}
	return out
}

func loadDir(dir string) *chart {
	files := map[string][]byte{}
	must(filepath.Walk(dir, func(p string, fi os.FileInfo, err error) error {
		if err != nil || fi.IsDir() {
			return err
		}
		rel, _ := filepath.Rel(dir, p)
		b, err := os.ReadFile(p)
		files[filepath.ToSlash(rel)] = b
		return err
	}))
	return fromFiles(files)
}

// merge: src wins over dst; an explicit null in src deletes the key.
func merge(dst, src M) M {
	out := M{}
	for k, v := range dst {
		out[k] = v
	}
	for k, v := range src {
		if v == nil {
			delete(out, k)
			continue
		}
		if vm, ok := v.(M); ok {
			if dm, ok := out[k].(M); ok {
				out[k] = merge(dm, vm)
				continue
			}
		}
		out[k] = v
	}
	return out
}

type Files map[string][]byte

func (f Files) Get(n string) string      { return string(f[n]) }
func (f Files) GetBytes(n string) []byte { return f[n] }
func (f Files) Glob(p string) Files {
	o := Files{}
	for k, v := range f {
		if ok, _ := path.Match(p, k); ok || (strings.HasSuffix(p, "**") && strings.HasPrefix(k, strings.TrimSuffix(p, "**"))) {
			o[k] = v
		}
	}
	return o
}
func (f Files) Lines(n string) []string { return strings.Split(strings.TrimSuffix(string(f[n]), "\n"), "\n") }
func (f Files) AsConfig() string {
	m := map[string]string{}
	for k, v := range f {
		m[path.Base(k)] = string(v)
	}
	return toYAML(m)
}
func (f Files) AsSecrets() string {
	m := map[string]string{}
	for k, v := range f {
		m[path.Base(k)] = base64.StdEncoding.EncodeToString(v)
	}
	return toYAML(m)
}

type Versions []string

func (v Versions) Has(s string) bool {
	for _, x := range v {
		if x == s {
			return true
		}
	}
	return false
}

func toYAML(v interface{}) string {
	b, err := yaml.Marshal(v)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(string(b), "\n")
}

// find is what Helm's `lookup` answers about one object: empty where it is not there.
func find(objects []interface{}, api, kind, namespace, name string) M {
	for _, o := range objects {
		object, _ := o.(M)
		meta, _ := object["metadata"].(M)
		if object["apiVersion"] == api && object["kind"] == kind && meta["namespace"] == namespace && meta["name"] == name {
			return object
		}
	}
	return M{}
}

func enabled(parent M, dep M, vals M) bool {
	cond, _ := dep["condition"].(string)
	for _, c := range strings.Split(cond, ",") {
		c = strings.TrimSpace(c)
		if c == "" {
			continue
		}
		var cur interface{} = vals
		for _, p := range strings.Split(c, ".") {
			m, ok := cur.(M)
			if !ok {
				cur = nil
				break
			}
			cur = m[p]
		}
		if b, ok := cur.(bool); ok {
			return b
		}
	}
	return true
}

type tplFile struct {
	name string
	src  string
	ctx  M
}

func collect(c *chart, vals M, prefix string, rel, caps M, out *[]tplFile) M {
	deps, _ := c.meta["dependencies"].([]interface{})
	subctx := M{}
	for _, s := range c.subs {
		key := s.name
		on := true
		for _, d := range deps {
			dm, _ := d.(M)
			if dm["name"] == s.name {
				if a, ok := dm["alias"].(string); ok && a != "" {
					key = a
				}
				on = enabled(c.meta, dm, vals)
			}
		}
		if !on {
			continue
		}
		sv, _ := vals[key].(M)
		eff := merge(s.values, sv)
		g := M{}
		if x, ok := eff["global"].(M); ok {
			g = x
		}
		if x, ok := vals["global"].(M); ok {
			g = merge(g, x)
		}
		eff["global"] = g
		subctx[key] = collect(s, eff, prefix+"/charts/"+s.name, rel, caps, out)
		vals[key] = eff
	}
	meta := M{}
	for k, v := range c.meta {
		meta[strings.ToUpper(k[:1])+k[1:]] = v
	}
	fs := Files{}
	for p, d := range c.files {
		if !strings.HasPrefix(p, "templates/") {
			fs[p] = d
		}
	}
	ctx := M{"Values": vals, "Release": rel, "Chart": meta, "Capabilities": caps, "Files": fs, "Subcharts": subctx}
	for p, d := range c.files {
		if strings.HasPrefix(p, "templates/") {
			cc := M{}
			for k, v := range ctx {
				cc[k] = v
			}
			cc["Template"] = M{"Name": prefix + "/" + p, "BasePath": prefix + "/templates"}
			isLib := c.meta["type"] == "library"
			name := prefix + "/" + p
			if isLib && !strings.HasPrefix(path.Base(p), "_") {
				name = prefix + "/templates/_lib_" + path.Base(p)
			}
			*out = append(*out, tplFile{name, string(d), cc})
		}
	}
	return ctx
}

type multi []string

func (m *multi) String() string     { return "" }
func (m *multi) Set(s string) error { *m = append(*m, s); return nil }

func main() {
	var vf, sets, only, apis multi
	ns := flag.String("namespace", "default", "")
	kv := flag.String("kube-version", "v1.33.0", "")
	rname := flag.String("name", "release-name", "")
	strict := flag.Bool("strict", false, "fail on missing map keys")
	notes := flag.Bool("notes", false, "print NOTES.txt instead of the manifests")
	there := flag.String("lookup", "", "YAML file with objects that `lookup` finds, a list; then it is an upgrade")
	flag.Var(&vf, "f", "values file")
	flag.Var(&sets, "set-json", "path=json")
	flag.Var(&only, "show-only", "template path suffix")
	flag.Var(&apis, "api-versions", "")
	flag.Parse()
	c := loadDir(flag.Arg(0))
	user := M{}
	for _, f := range vf {
		b, err := os.ReadFile(f)
		must(err)
		m := M{}
		must(yaml.Unmarshal(b, &m))
		user = merge(user, m)
	}
	for _, s := range sets {
		i := strings.Index(s, "=")
		var v interface{}
		if err := json.Unmarshal([]byte(s[i+1:]), &v); err != nil {
			must(fmt.Errorf("--set-json %s: %w", s, err))
		}
		parts := strings.Split(s[:i], ".")
		for j := len(parts) - 1; j >= 0; j-- {
			v = M{parts[j]: v}
		}
		user = merge(user, v.(M))
	}
	vals := merge(c.values, user)
	if c.schema != nil {
		vb, _ := json.Marshal(vals)
		res, err := gojsonschema.Validate(gojsonschema.NewBytesLoader(c.schema), gojsonschema.NewBytesLoader(vb))
		must(err)
		if !res.Valid() {
			fmt.Fprintln(os.Stderr, "Error: values don't meet the specifications of values.schema.json:")
			for _, e := range res.Errors() {
				fmt.Fprintln(os.Stderr, "-", e)
			}
			os.Exit(2)
		}
	}
	p := strings.SplitN(strings.TrimPrefix(*kv, "v"), ".", 3)
	var objects []interface{}
	if *there != "" {
		b, err := os.ReadFile(*there)
		must(err)
		must(yaml.Unmarshal(b, &objects))
	}
	upgrade := *there != ""
	rel := M{"Name": *rname, "Namespace": *ns, "IsInstall": !upgrade, "IsUpgrade": upgrade, "Revision": 1, "Service": "Helm"}
	kube := M{"Version": *kv, "Major": p[0], "Minor": p[1], "GitVersion": *kv}
	caps := M{"KubeVersion": kube, "APIVersions": Versions(append([]string{"v1", "apps/v1", "batch/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1"}, apis...)), "HelmVersion": M{"Version": "v3.17.0"}}
	var tf []tplFile
	collect(c, vals, c.name, rel, caps, &tf)
	sort.Slice(tf, func(i, j int) bool { return tf[i].name < tf[j].name })

	root := template.New("gotpl")
	if *strict {
		root.Option("missingkey=error")
	} else {
		root.Option("missingkey=zero")
	}
	fm := sprig.TxtFuncMap()
	delete(fm, "env")
	delete(fm, "expandenv")
	fm["toYaml"] = toYAML
	fm["fromYaml"] = func(s string) M {
		m := M{}
		if err := yaml.Unmarshal([]byte(s), &m); err != nil {
			m["Error"] = err.Error()
		}
		return m
	}
	fm["fromYamlArray"] = func(s string) []interface{} { a := []interface{}{}; yaml.Unmarshal([]byte(s), &a); return a }
	fm["toJson"] = func(v interface{}) string { b, _ := json.Marshal(v); return string(b) }
	fm["fromJson"] = func(s string) M { m := M{}; json.Unmarshal([]byte(s), &m); return m }
	fm["fromJsonArray"] = func(s string) []interface{} { a := []interface{}{}; json.Unmarshal([]byte(s), &a); return a }
	fm["toToml"] = func(v interface{}) string { var b bytes.Buffer; toml.NewEncoder(&b).Encode(v); return b.String() }
	fm["required"] = func(msg string, v interface{}) (interface{}, error) {
		if s, ok := v.(string); v == nil || (ok && s == "") {
			return v, fmt.Errorf("%s", msg)
		}
		return v, nil
	}
	fm["fail"] = func(msg string) (string, error) { return "", fmt.Errorf("%s", msg) }
	fm["lookup"] = func(api, kind, namespace, name string) M { return find(objects, api, kind, namespace, name) }
	depth := map[string]int{}
	fm["include"] = func(n string, data interface{}) (string, error) {
		depth[n]++
		defer func() { depth[n]-- }()
		if depth[n] > 1000 {
			return "", fmt.Errorf("include recursion: %s", n)
		}
		var b strings.Builder
		err := root.ExecuteTemplate(&b, n, data)
		return b.String(), err
	}
	fm["tpl"] = func(s string, data interface{}) (string, error) {
		t, err := root.Clone()
		if err != nil {
			return "", err
		}
		t2, err := t.New("tpl").Parse(s)
		if err != nil {
			return "", err
		}
		var b strings.Builder
		err = t2.Execute(&b, data)
		return strings.ReplaceAll(b.String(), "<no value>", ""), err
	}
	root.Funcs(fm)
	for _, f := range tf {
		_, err := root.New(f.name).Parse(f.src)
		must(err)
	}
	if *notes {
		var buf bytes.Buffer
		for _, f := range tf {
			if f.name == c.name+"/templates/NOTES.txt" {
				must(root.ExecuteTemplate(&buf, f.name, f.ctx))
			}
		}
		fmt.Print(strings.ReplaceAll(buf.String(), "<no value>", ""))
		return
	}
	for _, f := range tf {
		b := path.Base(f.name)
		if strings.HasPrefix(b, "_") || strings.HasSuffix(b, ".txt") || strings.HasSuffix(b, ".tpl") {
			continue
		}
		if len(only) > 0 {
			hit := false
			for _, o := range only {
				hit = hit || strings.HasSuffix("/"+f.name, "/"+o)
			}
			if !hit {
				continue
			}
		}
		var buf bytes.Buffer
		must(root.ExecuteTemplate(&buf, f.name, f.ctx))
		s := strings.ReplaceAll(buf.String(), "<no value>", "")
		for _, doc := range strings.Split("\n"+s, "\n---") {
			if strings.TrimSpace(doc) == "" {
				continue
			}
			var any interface{}
			if err := yaml.Unmarshal([]byte(doc), &any); err != nil {
				must(fmt.Errorf("%s: %w\n%s", f.name, err, doc))
			}
			if any == nil {
				continue
			}
			fmt.Printf("---\n# Source: %s\n%s\n", f.name, strings.Trim(doc, "\n"))
		}
	}
}
